"""``python -m autobatch`` is the command ``autobatch``."""

import sys

from autobatch.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
