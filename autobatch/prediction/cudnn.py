"""Asks cuDNN for the workspace of convolutions; ``workspaces`` runs this as a script in a child process.

cuDNN 9.8 and later plans for a *described* device, without card and driver ("Deviceless ahead-of-time compilation" in
its documentation). The questions are those of torch (``aten/src/ATen/native/cudnn/Conv_v8.cpp``) without
``torch.backends.cudnn.benchmark``: the instant heuristic, and the first engine that torch takes and that makes a plan.
Numbers are those of ``cudnn_graph.h`` of cuDNN 9.

A question is a line of JSON. The first line of the answer has the version of cuDNN, each other one bytes, or null
without a plan. cuDNN may abort the process.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, Literal, NamedTuple

Pass = Literal["forward", "input gradient", "weight gradient"]

_ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


class Convolution(NamedTuple):
    """One call of cuDNN; sizes of space are two or three numbers."""

    kind: Pass
    inputs: tuple[int, ...]  # samples, channels, space; also of the input's gradient
    weight: tuple[int, ...]  # channels out, channels in by group, space
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # on either side
    dilation: tuple[int, ...]
    dtype: str = "float32"  # of all three tensors
    channels_last: bool = False  # whether all three tensors are laid out so
    tf32: bool = True  # torch.backends.cudnn.allow_tf32
    deterministic: bool = False  # torch.backends.cudnn.deterministic, or torch.use_deterministic_algorithms()

    @property
    def groups(self) -> int:
        return self.inputs[1] // self.weight[1]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the output, or of its gradient."""
        space = zip(self.inputs[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in space
        ]
        return (self.inputs[0], self.weight[0], *sizes)

    def byte_counts(self) -> tuple[int, int, int]:
        item = _ITEM_BYTES[self.dtype]
        return item * math.prod(self.inputs), item * math.prod(self.outputs), item * math.prod(self.weight)


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
"""By architecture: compute capability, shared memory of a block in bytes, blocks and threads of a multiprocessor (from
"Compute Capabilities" in the CUDA C++ Programming Guide), and the memory clock in kHz of one such card. These and the
multiprocessors decide: with these alone, 360 of 360 answers for six cards were those for the whole description."""

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
    """Describe a card as cuDNN reads it, in the names of its JSON."""
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


_OLDEST = 90800  # the first version that plans for a described device
_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_ALIGNMENT = 32  # bytes, as torch states them
_OPERATIONS: dict[Pass, tuple[Descriptor, Attribute]] = {
    "forward": (Descriptor.FORWARD, Attribute.FORWARD_ALPHA),
    "input gradient": (Descriptor.INPUT_GRADIENT, Attribute.INPUT_GRADIENT_ALPHA),
    "weight gradient": (Descriptor.WEIGHT_GRADIENT, Attribute.WEIGHT_GRADIENT_ALPHA),
}
"""Each with the attribute of its factor alpha; beta, the convolution and the tensors follow."""

_CROSS_CORRELATION = 1
_INSTANT, _FALLBACK = 0, 2
_MOST_NOTES = 16


class _CudnnError(Exception):
    """A call of cuDNN failed."""


class Planner:
    """cuDNN for one card; ``version`` is 92000 for 9.20.0."""

    def __init__(self, library: ctypes.CDLL, architecture: str, multiprocessors: int) -> None:
        """Describe the card; raises ``ValueError`` if this cuDNN cannot plan for it."""
        self._library, self._made = library, list[int]()
        library.cudnnGetVersion.restype = ctypes.c_size_t
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        library.cudnnBackendSetAttribute.argtypes = [pointer, integer, integer, ctypes.c_int64, pointer]
        library.cudnnBackendGetAttribute.argtypes = [pointer, integer, integer, ctypes.c_int64, pointer, pointer]
        library.cudnnBackendFinalize.argtypes = library.cudnnBackendDestroyDescriptor.argtypes = [pointer]
        self.version = int(library.cudnnGetVersion())
        if self.version < _OLDEST or architecture not in DEVICES:
            raise ValueError(f"cuDNN {self.version} cannot plan for {architecture}")
        text = json.dumps(describe_device(architecture, multiprocessors)).encode() + b"\0"
        self._device = self._make(Descriptor.DEVICE)
        self._set(self._device, Attribute.DEVICE_JSON, Type.CHAR, ctypes.create_string_buffer(text, len(text)))
        self._finalize(self._device)

    def find_workspace(self, convolution: Convolution) -> int | None:
        """Bytes of the plan that torch runs; ``None`` if no engine has one."""
        with suppress(_CudnnError), self._temporaries():
            graph = self._make_graph(convolution)
            for mode in (_INSTANT, _FALLBACK):
                for config in self._list_configs(graph, mode):
                    if not self._is_refused(config, convolution) and (found := self._plan(config)) is not None:
                        return found
        return None

    def _make_graph(self, convolution: Convolution) -> int:
        code, channels_last = _DTYPES[convolution.dtype], convolution.channels_last
        sizes = {"w": convolution.weight, "x": convolution.inputs, "y": convolution.outputs}
        tensors = {name: self._make_tensor(name, each, code, channels_last) for name, each in sizes.items()}
        kind, first = _OPERATIONS[convolution.kind]
        operation, scale = self._make(kind), ctypes.c_double if convolution.dtype == "float64" else ctypes.c_float
        scale_type = Type.DOUBLE if convolution.dtype == "float64" else Type.FLOAT
        self._set(operation, first, scale_type, scale(1.0))
        self._set(operation, first + 1, scale_type, scale(0.0))
        # In this order in all three: of the weight's gradient the header lists dw, x, dy.
        parts = (self._make_convolution(convolution), tensors["w"], tensors["x"], tensors["y"])
        for attribute, part in enumerate(parts, start=first + 2):
            self._set(operation, attribute, Type.DESCRIPTOR, ctypes.c_void_p(part))
        self._finalize(operation)
        graph = self._make(Descriptor.GRAPH)
        self._set(graph, Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, ctypes.c_void_p(operation))
        return self._finalize(graph)

    def _make_convolution(self, convolution: Convolution) -> int:
        made = self._make(Descriptor.CONVOLUTION)
        computed_in = _DTYPES["float64" if convolution.dtype == "float64" else "float32"]
        self._set(made, Attribute.COMPUTE_TYPE, Type.DATA_TYPE, ctypes.c_int(computed_in))
        self._set(made, Attribute.MODE, Type.MODE, ctypes.c_int(_CROSS_CORRELATION))
        self._set(made, Attribute.DILATIONS, Type.INT64, _integers(convolution.dilation))
        self._set(made, Attribute.STRIDES, Type.INT64, _integers(convolution.stride))
        self._set(made, Attribute.PRE_PADDINGS, Type.INT64, _integers(convolution.padding))
        self._set(made, Attribute.POST_PADDINGS, Type.INT64, _integers(convolution.padding))
        self._set(made, Attribute.SPATIAL_DIMS, Type.INT64, ctypes.c_int64(len(convolution.stride)))
        return self._finalize(made)

    def _make_tensor(self, name: str, sizes: tuple[int, ...], code: int, channels_last: bool) -> int:  # noqa: FBT001 - of one call
        made = self._make(Descriptor.TENSOR)
        self._set(made, Attribute.DATA_TYPE, Type.DATA_TYPE, ctypes.c_int(code))
        self._set(made, Attribute.DIMENSIONS, Type.INT64, _integers(sizes))
        self._set(made, Attribute.TENSOR_STRIDES, Type.INT64, _integers(_strides_of(sizes, channels_last)))
        self._set(made, Attribute.UNIQUE_ID, Type.INT64, ctypes.c_int64(ord(name)))
        self._set(made, Attribute.ALIGNMENT, Type.INT64, ctypes.c_int64(_ALIGNMENT))
        return self._finalize(made)

    def _list_configs(self, graph: int, mode: int) -> Iterator[int]:
        heuristic = self._make(Descriptor.HEURISTIC)
        self._set(heuristic, Attribute.HEURISTIC_GRAPH, Type.DESCRIPTOR, ctypes.c_void_p(graph))
        self._set(heuristic, Attribute.HEURISTIC_MODE, Type.HEURISTIC_MODE, ctypes.c_int(mode))
        self._set(heuristic, Attribute.HEURISTIC_DEVICE, Type.DESCRIPTOR, ctypes.c_void_p(self._device))
        if self._library.cudnnBackendFinalize(heuristic) == 0:
            yield from self._read(heuristic, Attribute.HEURISTIC_RESULTS, Descriptor.ENGINE_CONFIG)

    def _is_refused(self, config: int, convolution: Convolution) -> bool:
        """Whether torch leaves an engine out for its numerics (``filterEngineConfigs``)."""
        engine = self._read(config, Attribute.CONFIG_ENGINE, Descriptor.ENGINE)[0]
        notes = (ctypes.c_int * _MOST_NOTES)()
        named = {*notes[: self._get(engine, Attribute.ENGINE_NOTES, Type.NOTE, notes)]}
        return (
            Note.DOWN_CONVERTS in named
            or (convolution.deterministic and Note.NONDETERMINISTIC in named)
            or (convolution.dtype == "float32" and not convolution.tf32 and Note.TENSOR_CORE in named)
        )

    def _plan(self, config: int) -> int | None:
        plan = self._make(Descriptor.PLAN)
        self._set(plan, Attribute.PLAN_CONFIG, Type.DESCRIPTOR, ctypes.c_void_p(config))
        self._set(plan, Attribute.PLAN_DEVICE, Type.DESCRIPTOR, ctypes.c_void_p(self._device))
        if self._library.cudnnBackendFinalize(plan):
            return None
        size = ctypes.c_int64(0)
        self._get(plan, Attribute.PLAN_WORKSPACE, Type.INT64, size)
        return size.value

    @contextmanager
    def _temporaries(self) -> Iterator[None]:
        kept = len(self._made)
        try:
            yield
        finally:
            for made in reversed(self._made[kept:]):
                self._library.cudnnBackendDestroyDescriptor(made)
            del self._made[kept:]

    def _make(self, kind: Descriptor) -> int:
        made = ctypes.c_void_p()
        _check(self._library.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(made)))
        self._made.append(made.value or 0)
        return self._made[-1]

    def _set(self, made: int, attribute: int, kind: Type, value: Any) -> None:
        count = len(value) if isinstance(value, ctypes.Array) else 1
        _check(self._library.cudnnBackendSetAttribute(made, attribute, kind, count, ctypes.byref(value)))

    def _get(self, made: int, attribute: int, kind: Type, value: Any) -> int:
        """Read an attribute into ``value``, and return the number of its elements."""
        most, count = len(value) if isinstance(value, ctypes.Array) else 1, ctypes.c_int64(0)
        given = (made, attribute, kind, most, ctypes.byref(count), ctypes.byref(value))
        _check(self._library.cudnnBackendGetAttribute(*given))
        return count.value

    def _finalize(self, made: int) -> int:
        _check(self._library.cudnnBackendFinalize(made))
        return made

    def _read(self, made: int, attribute: Attribute, kind: Descriptor) -> Sequence[int]:
        count = ctypes.c_int64(0)
        _check(self._library.cudnnBackendGetAttribute(made, attribute, Type.DESCRIPTOR, 0, ctypes.byref(count), None))
        found = (ctypes.c_void_p * max(count.value, 1))(*[self._make(kind) for _ in range(max(count.value, 1))])
        self._get(made, attribute, Type.DESCRIPTOR, found)
        return [each or 0 for each in found[: count.value]]


def _strides_of(sizes: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:  # noqa: FBT001 - of one call
    innermost_last = [0, *range(2, len(sizes)), 1] if channels_last else [*range(len(sizes))]
    strides, step = [0] * len(sizes), 1
    for axis in reversed(innermost_last):
        strides[axis], step = step, step * sizes[axis]
    return tuple(strides)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _check(status: int) -> None:
    if status:
        raise _CudnnError(status)


def _main(cudnn: str, cublas: str, architecture: str, multiprocessors: str) -> None:
    ctypes.CDLL(cublas, mode=ctypes.RTLD_GLOBAL)  # without it cuDNN aborts
    planner = Planner(ctypes.CDLL(cudnn, mode=ctypes.RTLD_GLOBAL), architecture, int(multiprocessors))
    print(planner.version, flush=True)  # noqa: T201 - its answer
    for line in sys.stdin:
        values = [tuple(value) if isinstance(value, list) else value for value in json.loads(line)]
        print(json.dumps(planner.find_workspace(Convolution._make(values))), flush=True)  # noqa: T201 - its answer


if __name__ == "__main__":
    _main(*sys.argv[1:])
