"""Arguments of ``fit`` that every integration refuses, and the beginning of the message."""

from __future__ import annotations

REFUSED_OPTIONS = [
    ({"target_batch": 0}, "target_batch=0"),
    ({"target_batch": 2.5}, "target_batch=2.5"),
    ({"target_batch": 10**9}, "target_batch=1000000000 is more than"),
    ({"target_batch": 10**8, "max_micro_batch": 1}, "micro-batches of at most 1, more than"),
    ({"check": "no"}, "check='no'"),
    ({"budget": "0GiB"}, "^budget='0GiB' is not a size"),
    ({"budget": float("nan")}, "^budget=nan is not a size"),
    ({"headroom": 1.5}, r"^headroom=1\.5: a fraction"),
    ({"budget": "8MiB", "headroom": "8MiB"}, "^headroom='8MiB' leaves nothing"),
    ({"max_micro_batch": 0}, "^max_micro_batch=0 must be an int"),
    ({"objective": "speed"}, "^objective='speed' is not known"),
    ({"accumulate_in_float32": None}, "^accumulate_in_float32=None must be True or False"),
    ({"reuse": "no"}, "^reuse='no' must be True or False"),
    ({"progress": 1}, "^progress=1 must be True or False"),
    ({"device": "gpu7"}, "^device='gpu7' is no device"),
]
"""Pairs of arguments and a pattern."""
