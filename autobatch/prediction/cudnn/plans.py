"""Asks cuDNN itself, in a process of its own, for the workspace of convolutions: ``python -m`` this module.

cuDNN 9.8 and later plans for a *described* device, with no card and no driver ("Deviceless ahead-of-time compilation"
in its documentation). The questions are put as torch puts them (``aten/src/ATen/native/cudnn/Conv_v8.cpp``) with
``torch.backends.cudnn.benchmark`` off: the instant heuristic, engines that torch refuses left out, and of the rest the
first that makes a plan. Does not cover ``benchmark=True``, where times decide, nor which convolutions torch runs with
kernels of its own. Imports neither torch nor anything else that takes long.

A question is one line of JSON on standard input, and so is its answer on standard output: first the version of cuDNN,
then bytes, or null where it has no plan. It may abort the process; what was answered until then has been read.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from autobatch.prediction.cudnn.convolution import Convolution, Pass

__all__ = ["DEVICES", "Planner"]

_OLDEST = 90800
"""The first version that plans for a described device."""

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

_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_ALIGNMENT = 32
"""Bytes that torch states; its allocator's blocks begin at multiples of 512."""


class _Descriptor(IntEnum):
    """``cudnnBackendDescriptorType_t`` of ``cudnn_graph.h``, as the next three."""

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


class _Attribute(IntEnum):
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


class _Type(IntEnum):
    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    MODE = 7
    HEURISTIC_MODE = 8
    NOTE = 11
    DESCRIPTOR = 15
    CHAR = 24


class _Note(IntEnum):
    TENSOR_CORE = 0
    DOWN_CONVERTS = 1
    NONDETERMINISTIC = 4


_OPERATIONS: dict[Pass, tuple[_Descriptor, _Attribute]] = {
    "forward": (_Descriptor.FORWARD, _Attribute.FORWARD_ALPHA),
    "input gradient": (_Descriptor.INPUT_GRADIENT, _Attribute.INPUT_GRADIENT_ALPHA),
    "weight gradient": (_Descriptor.WEIGHT_GRADIENT, _Attribute.WEIGHT_GRADIENT_ALPHA),
}
"""Each with the attribute of its factor alpha; then follow beta, the convolution, and two tensors of three."""

_CROSS_CORRELATION = 1
_INSTANT, _FALLBACK = 0, 2
_MOST_NOTES = 16


class _CudnnError(Exception):
    """A call of cuDNN failed."""


class Planner:
    """cuDNN for one card.

    Attributes:
        version: cuDNN's own number of its version, 92000 for 9.20.0.
    """

    def __init__(self, library: ctypes.CDLL, architecture: str, multiprocessors: int) -> None:
        """Describe the card; raises ``ValueError`` for an architecture that is not in ``DEVICES``, or an old cuDNN."""
        self._library, self._made = library, list[int]()
        library.cudnnGetVersion.restype = ctypes.c_size_t
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        library.cudnnBackendSetAttribute.argtypes = [pointer, integer, integer, ctypes.c_int64, pointer]
        library.cudnnBackendGetAttribute.argtypes = [pointer, integer, integer, ctypes.c_int64, pointer, pointer]
        library.cudnnBackendFinalize.argtypes = library.cudnnBackendDestroyDescriptor.argtypes = [pointer]
        self.version = int(library.cudnnGetVersion())
        if self.version < _OLDEST or architecture not in DEVICES:
            raise ValueError(f"cuDNN {self.version} cannot plan for {architecture}")
        text = json.dumps(_describe_device(architecture, multiprocessors)).encode() + b"\0"
        self._device = self._make(_Descriptor.DEVICE)
        self._set(self._device, _Attribute.DEVICE_JSON, _Type.CHAR, ctypes.create_string_buffer(text, len(text)))
        self._finalize(self._device)

    def find_workspace(self, convolution: Convolution) -> int | None:
        """Bytes of the plan that torch runs; ``None`` where no engine has one."""
        try:
            with self._temporaries():
                return self._find_workspace(convolution)
        except _CudnnError:
            return None

    def _find_workspace(self, convolution: Convolution) -> int | None:
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
        scale_type = _Type.DOUBLE if convolution.dtype == "float64" else _Type.FLOAT
        self._set(operation, first, scale_type, scale(1.0))
        self._set(operation, first + 1, scale_type, scale(0.0))
        # In this order in all three: of the weight's gradient the header lists dw, x, dy.
        parts = (self._make_convolution(convolution), tensors["w"], tensors["x"], tensors["y"])
        for attribute, part in enumerate(parts, start=first + 2):
            self._set(operation, attribute, _Type.DESCRIPTOR, ctypes.c_void_p(part))
        self._finalize(operation)
        graph = self._make(_Descriptor.GRAPH)
        self._set(graph, _Attribute.GRAPH_OPERATIONS, _Type.DESCRIPTOR, ctypes.c_void_p(operation))
        return self._finalize(graph)

    def _make_convolution(self, convolution: Convolution) -> int:
        made = self._make(_Descriptor.CONVOLUTION)
        computed_in = _DTYPES["float64" if convolution.dtype == "float64" else "float32"]
        self._set(made, _Attribute.COMPUTE_TYPE, _Type.DATA_TYPE, ctypes.c_int(computed_in))
        self._set(made, _Attribute.MODE, _Type.MODE, ctypes.c_int(_CROSS_CORRELATION))
        self._set(made, _Attribute.DILATIONS, _Type.INT64, _integers(convolution.dilation))
        self._set(made, _Attribute.STRIDES, _Type.INT64, _integers(convolution.stride))
        self._set(made, _Attribute.PRE_PADDINGS, _Type.INT64, _integers(convolution.padding))
        self._set(made, _Attribute.POST_PADDINGS, _Type.INT64, _integers(convolution.padding))
        self._set(made, _Attribute.SPATIAL_DIMS, _Type.INT64, ctypes.c_int64(len(convolution.stride)))
        return self._finalize(made)

    def _make_tensor(self, name: str, sizes: tuple[int, ...], code: int, channels_last: bool) -> int:  # noqa: FBT001 - of one call
        made = self._make(_Descriptor.TENSOR)
        self._set(made, _Attribute.DATA_TYPE, _Type.DATA_TYPE, ctypes.c_int(code))
        self._set(made, _Attribute.DIMENSIONS, _Type.INT64, _integers(sizes))
        self._set(made, _Attribute.TENSOR_STRIDES, _Type.INT64, _integers(_strides_of(sizes, channels_last)))
        self._set(made, _Attribute.UNIQUE_ID, _Type.INT64, ctypes.c_int64(ord(name)))
        self._set(made, _Attribute.ALIGNMENT, _Type.INT64, ctypes.c_int64(_ALIGNMENT))
        return self._finalize(made)

    def _list_configs(self, graph: int, mode: int) -> Iterator[int]:
        heuristic = self._make(_Descriptor.HEURISTIC)
        self._set(heuristic, _Attribute.HEURISTIC_GRAPH, _Type.DESCRIPTOR, ctypes.c_void_p(graph))
        self._set(heuristic, _Attribute.HEURISTIC_MODE, _Type.HEURISTIC_MODE, ctypes.c_int(mode))
        self._set(heuristic, _Attribute.HEURISTIC_DEVICE, _Type.DESCRIPTOR, ctypes.c_void_p(self._device))
        if self._library.cudnnBackendFinalize(heuristic) == 0:
            yield from self._read(heuristic, _Attribute.HEURISTIC_RESULTS, _Descriptor.ENGINE_CONFIG)

    def _is_refused(self, config: int, convolution: Convolution) -> bool:
        """Whether torch leaves an engine out for what it does to numbers (``filterEngineConfigs``)."""
        engine = self._read(config, _Attribute.CONFIG_ENGINE, _Descriptor.ENGINE)[0]
        notes = (ctypes.c_int * _MOST_NOTES)()
        named = {*notes[: self._get(engine, _Attribute.ENGINE_NOTES, _Type.NOTE, notes)]}
        return (
            _Note.DOWN_CONVERTS in named
            or (convolution.deterministic and _Note.NONDETERMINISTIC in named)
            or (convolution.dtype == "float32" and not convolution.tf32 and _Note.TENSOR_CORE in named)
        )

    def _plan(self, config: int) -> int | None:
        plan = self._make(_Descriptor.PLAN)
        self._set(plan, _Attribute.PLAN_CONFIG, _Type.DESCRIPTOR, ctypes.c_void_p(config))
        self._set(plan, _Attribute.PLAN_DEVICE, _Type.DESCRIPTOR, ctypes.c_void_p(self._device))
        if self._library.cudnnBackendFinalize(plan):
            return None
        size = ctypes.c_int64(0)
        self._get(plan, _Attribute.PLAN_WORKSPACE, _Type.INT64, size)
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

    def _make(self, kind: _Descriptor) -> int:
        made = ctypes.c_void_p()
        _check(self._library.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(made)))
        self._made.append(made.value or 0)
        return self._made[-1]

    def _set(self, made: int, attribute: int, kind: _Type, value: Any) -> None:
        count = len(value) if isinstance(value, ctypes.Array) else 1
        _check(self._library.cudnnBackendSetAttribute(made, attribute, kind, count, ctypes.byref(value)))

    def _get(self, made: int, attribute: int, kind: _Type, value: Any) -> int:
        """Read an attribute into ``value``; returns how many it has."""
        most, count = len(value) if isinstance(value, ctypes.Array) else 1, ctypes.c_int64(0)
        given = (made, attribute, kind, most, ctypes.byref(count), ctypes.byref(value))
        _check(self._library.cudnnBackendGetAttribute(*given))
        return count.value

    def _finalize(self, made: int) -> int:
        _check(self._library.cudnnBackendFinalize(made))
        return made

    def _read(self, made: int, attribute: _Attribute, kind: _Descriptor) -> Sequence[int]:
        """The descriptors that an attribute lists."""
        count = ctypes.c_int64(0)
        _check(self._library.cudnnBackendGetAttribute(made, attribute, _Type.DESCRIPTOR, 0, ctypes.byref(count), None))
        found = (ctypes.c_void_p * max(count.value, 1))(*[self._make(kind) for _ in range(max(count.value, 1))])
        self._get(made, attribute, _Type.DESCRIPTOR, found)
        return [each or 0 for each in found[: count.value]]


def _describe_device(architecture: str, multiprocessors: int) -> dict[str, Any]:
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


def _strides_of(sizes: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:  # noqa: FBT001 - of one call
    """Strides of a dense tensor, also of dimensions of size 1, as torch states them (``fixSizeOneDimStride``)."""
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
