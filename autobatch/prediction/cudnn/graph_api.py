"""Lists what cuDNN's graph interface takes: its numbers, from ``cudnn_graph.h`` of cuDNN 9, and cards as it reads them.

Covers descriptors, attributes, types of attributes, notes of engines; and by architecture what decides cuDNN's answers
where no card is there (from cuDNN 9.8 on). Does not cover calls: those are ``plans``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

__all__ = ["DEVICES", "Attribute", "Descriptor", "Note", "Type", "describe_device"]


class Descriptor(IntEnum):
    """``cudnnBackendDescriptorType_t``."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTIC = 4
    PLAN = 5
    FORWARD = 10
    WEIGHT_GRADIENT = 11
    INPUT_GRADIENT = 12
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Attribute(IntEnum):
    """``cudnnBackendAttributeName_t``."""

    COMPUTE_TYPE = 100
    MODE = 101
    DILATIONS = 102
    STRIDES = 103
    POST_PADDINGS = 104
    PRE_PADDINGS = 105
    SPATIAL_DIMS = 106
    HEURISTIC_MODE = 200
    HEURISTIC_GRAPH = 201
    HEURISTIC_RESULTS = 202
    HEURISTIC_DEVICE = 204
    CONFIG_ENGINE = 300
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    FORWARD_ALPHA = 700
    INPUT_GRADIENT_ALPHA = 706
    WEIGHT_GRADIENT_ALPHA = 712
    GRAPH_OPERATIONS = 801
    ALIGNMENT = 900
    DATA_TYPE = 901
    DIMENSIONS = 902
    TENSOR_STRIDES = 903
    UNIQUE_ID = 906
    ENGINE_NOTES = 1303
    DEVICE_JSON = 2702


class Type(IntEnum):
    """``cudnnBackendAttributeType_t``."""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    MODE = 7
    HEURISTIC_MODE = 8
    NOTE = 11
    DESCRIPTOR = 15
    CHAR = 24


class Note(IntEnum):
    """``cudnnBackendNumericalNote_t``: what an engine does to numbers."""

    TENSOR_CORE = 0
    DOWN_CONVERTS = 1
    NONDETERMINISTIC = 4


DEVICES: dict[str, tuple[int, int, int, int, int]] = {
    "sm_70": (700, 98304, 32, 2048, 877000),
    "sm_75": (750, 65536, 16, 1024, 5001000),
    "sm_80": (800, 166912, 32, 2048, 1215000),
    "sm_86": (860, 101376, 16, 1536, 9751000),
    "sm_89": (890, 101376, 24, 1536, 6251000),
    "sm_90": (900, 232448, 32, 2048, 2619000),
    "sm_100": (1000, 232448, 32, 2048, 3996000),
    "sm_120": (1200, 101376, 24, 1536, 14001000),
}
"""By architecture: compute capability, shared memory of a block in bytes, blocks and threads of a multiprocessor; from
"Compute Capabilities" in the CUDA C++ Programming Guide; and the memory clock in kHz of one such card. These and the
number of multiprocessors decide: asked with these alone true, 360 of 360 answers for six cards were those for the whole
description (cuDNN 9.20). The memory clock decided one of them, by 3 %."""

_SAME_EVERYWHERE = {
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxThreadsPerBlock": 1024,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "smClockRateKHz": 1410000,
    "l2CacheSize": 41943040,
    "totalGlobalMem": 42405462016,
    "deviceName": "described",
}


def describe_device(architecture: str, multiprocessors: int) -> dict[str, Any]:
    """What cuDNN reads of a card, in the names of its JSON; the architecture is one of ``DEVICES``."""
    version, shared, blocks, threads, clock = DEVICES[architecture]
    decisive = {
        "deviceVer": version,
        "maxSharedMemoryPerBlockOptin": shared,
        "maxCtasPerSM": blocks,
        "maxThreadsPerSM": threads,
        "multiProcessorCount": multiprocessors,
        "memClockRateKHz": clock,
    }
    return {**_SAME_EVERYWHERE, **decisive}
