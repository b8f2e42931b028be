"""Runs the command ``autobatch`` as ``python -m autobatch``."""

import sys

from autobatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
