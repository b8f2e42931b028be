"""Plants the bug that the environment names, before tests are collected and in each rank that a test starts."""

from __future__ import annotations

import os

from builders import ranks

from planted_bugs import NAME_IN_ENVIRONMENT, all_bugs, plant

for _bug in all_bugs():
    if _bug.name == os.environ.get(NAME_IN_ENVIRONMENT):
        plant(_bug)
ranks._IMPORTED.append(__name__)
