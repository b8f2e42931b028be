"""The numbers of cuDNN's graph interface that ``plans`` uses, from ``cudnn_graph.h`` of cuDNN 9.

Covers descriptors, attributes, types of attributes and notes of engines. Does not cover calls: those are ``plans``.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Attribute", "Descriptor", "Note", "Type"]


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
