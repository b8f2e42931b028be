"""Which errors are an OOM: a table of real exceptions and the chains they come in; and that no reference stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.memory.oom import describe_error, is_oom

pytestmark = pytest.mark.quick

CUDA_OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 21.96 GiB."
KERNEL_HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call."


def accelerator_error(text: str, code: int | None = None) -> torch.AcceleratorError:
    """As torch raises it: the runtime's number is an attribute set on the object."""
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


def raised_by(call: Callable[[], object]) -> BaseException:
    """The error that a call really raises, without its traceback."""
    try:
        call()
    except BaseException as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


class OutOfResources(Exception):
    """Triton's error for a kernel that wants more shared memory than a multiprocessor has; Triton is not installed."""


RETRYABLE = {
    "caching allocator": torch.OutOfMemoryError(CUDA_OOM),
    "two arguments": torch.OutOfMemoryError(CUDA_OOM, "while training"),
    "no text": torch.OutOfMemoryError(),
    "old name": torch.cuda.OutOfMemoryError(CUDA_OOM),
    "HIP": torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
    "XPU": torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB."),
    "untyped allocator": RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 29.00 GiB total)"),
    "runtime": RuntimeError("CUDA error: out of memory" + KERNEL_HINT),
    "runtime, typed": accelerator_error("CUDA error: out of memory" + KERNEL_HINT),
    "runtime, by number": accelerator_error("a text nobody has seen", 2),
    "HIP runtime": accelerator_error("HIP error: out of memory"),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "hipBLAS": RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cuSOLVER": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "cuSPARSE": RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "Triton launch": RuntimeError("Triton Error [CUDA]: out of memory"),
    "Triton launch on HIP": RuntimeError("Triton Error [HIP]: out of memory"),
    "Thrust": RuntimeError("parallel_for failed: cudaErrorMemoryAllocation: out of memory"),
    "driver, by name": RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    "SYCL": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 17.90 GB, max allowed: 18.13 GB)."),
    "MPS, one tensor": RuntimeError("Invalid buffer size: 24.00 GiB"),
    "Gaudi": RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::402653184 (384)MB"),
    "CPU": raised_by(lambda: torch.empty(2**55)),
    "CPU on Windows": RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: "
                                   "you tried to allocate 1073741824 bytes."),
    "DataParallel": torch.OutOfMemoryError(f"Caught OutOfMemoryError in replica 0 on device 0.\n{CUDA_OOM}"),
    "raised again": RuntimeError(f"training failed: {CUDA_OOM}"),
}  # fmt: skip

AMBIGUOUS = {
    "cuBLAS handle": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cuDNN unsupported": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you "
                                      "passed in a non-contiguous input."),
    "cuDNN internal": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    "cuFFT internal": RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    "cuDNN engine": RuntimeError("GET was unable to find an engine to execute this computation"),
    "cuDNN algorithm": RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    "allocator without NVML": RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "Allocator.cpp":806'),
}  # fmt: skip

FATAL = {
    "assert": accelerator_error("CUDA error: device-side assert triggered" + KERNEL_HINT, 710),
    "assert, untyped": RuntimeError("CUDA error: device-side assert triggered" + KERNEL_HINT),
    "illegal address": accelerator_error("CUDA error: an illegal memory access was encountered", 700),
    "illegal address, untyped": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "illegal instruction": RuntimeError("CUDA error: an illegal instruction was encountered"),
    "misaligned": RuntimeError("CUDA error: misaligned address"),
    "program counter": RuntimeError("CUDA error: invalid program counter"),
    "launch failure": RuntimeError("CUDA error: unspecified launch failure"),
    "hardware stack": RuntimeError("CUDA error: hardware stack error"),
    "address space": RuntimeError("CUDA error: operation not supported on global/shared address space"),
    "ECC": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "timeout": RuntimeError("CUDA error: the launch timed out and was terminated"),
    "sticky, by number": accelerator_error("a text nobody has seen", 719),
    "NCCL": torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "another rank is gone": torch.distributed.DistStoreError("wait timeout after 300000ms"),
    "NCCL, untyped": RuntimeError("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error"),
    "NCCL, from DataParallel": RuntimeError("NCCL Error 1: unhandled cuda error"),
    "NCCL, by its own name": RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed. 'out of memory'"),
    "loader's worker": RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: "
                                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    "loader's pinned memory": torch.AcceleratorError("Caught AcceleratorError in pin memory thread for device 0.\n"
                                                     "CUDA error: out of memory"),
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(CUDA_OOM),
}  # fmt: skip

UNRELATED = {
    "kernel's shared memory": OutOfResources(
        "out of resource: shared memory, Required: 163840, Hardware limit: 101376."
    ),
    "the same, wrapped by inductor": RuntimeError("OutOfResources: out of resource: shared memory, Required: 163840"),
    "shapes": raised_by(lambda: torch.zeros(3, 4) @ torch.zeros(3, 4)),
    "batch norm of one": raised_by(lambda: torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))),
    "INT_MAX": RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"),
    "size overflow": raised_by(lambda: torch.empty(2**62, 2**10)),
    "Python's own": raised_by(lambda: bytearray(2**62)),
    "value that mentions it": ValueError(
        "could not place the out of memory map; CUDA out of memory. Tried to allocate"
    ),
    "key that mentions it": KeyError("CUDA error: out of memory"),
    "number on another type": type("Odd", (RuntimeError,), {"error_code": 2})("not an accelerator's"),
    "bare cuda": RuntimeError("CUDA error: invalid argument"),
    "no CUDA": raised_by(lambda: torch.empty(1, device="cuda")) if not torch.cuda.is_available() else AssertionError(),
}


def cases(*tables: dict[str, BaseException]) -> pytest.MarkDecorator:
    """One test for each row, named as the row."""
    rows = [pytest.param(error, id=name) for table in tables for name, error in table.items()]
    return pytest.mark.parametrize("error", rows)


def from_cause(outer: BaseException, cause: BaseException | None) -> BaseException:
    """``outer``, raised from ``cause``."""
    try:
        raise outer from cause
    except BaseException as error:
        return error


def in_context(outer: BaseException, context: BaseException) -> BaseException:
    """``outer``, raised while ``context`` was handled."""
    try:
        try:
            raise context
        except BaseException:
            raise outer  # noqa: B904 (the context is the point)
    except BaseException as error:
        return error


@cases(RETRYABLE)
def test_running_out_of_memory_is_an_oom_however_it_is_said(error):
    """Every way in which torch and its libraries say that memory ended is an OOM, also where memory looks free."""
    assert is_oom(error)
    assert is_oom(error, memory_is_low=False)


@cases(FATAL, UNRELATED)
def test_anything_else_is_no_oom(error):
    """What a smaller batch does not cure is no OOM, not even where memory is low."""
    assert not is_oom(error)
    assert not is_oom(error, memory_is_low=True)


@cases(FATAL)
def test_after_what_is_fatal_an_oom_is_none(error):
    """An OOM in the same chain as a dead context, a broken communicator or an interrupt is not retried."""
    assert not is_oom(from_cause(oom(), error))


@cases(AMBIGUOUS)
@pytest.mark.parametrize("low", [True, False])
def test_ambiguous_errors_are_decided_by_memory(error, low):
    """An error that has several causes is an OOM exactly where memory is low."""
    assert is_oom(error, memory_is_low=low) is low


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="memory can be asked here")
@cases(AMBIGUOUS)
def test_ambiguous_errors_are_no_oom_where_memory_cannot_be_asked(error):
    """Without an initialised CUDA nobody knows that memory is low, so nothing is retried."""
    assert not is_oom(error)


GIB = 1024**3


@pytest.mark.parametrize(
    ("reserved", "memory", "expected"),
    [
        pytest.param({0: 1}, {0: (int(4.9 * GIB), 100 * GIB)}, True, id="under 5 %"),
        pytest.param({0: 1}, {0: (int(5.1 * GIB), 100 * GIB)}, False, id="over 5 %"),
        pytest.param({0: 1}, {0: (511 * 1024**2, 4 * GIB)}, True, id="under 512 MiB of a small device"),
        pytest.param({0: 1}, {0: (513 * 1024**2, 4 * GIB)}, False, id="over 512 MiB of a small device"),
        pytest.param({0: 1, 1: 1}, {0: (50 * GIB, 100 * GIB), 1: (0, 100 * GIB)}, True, id="the second device"),
        pytest.param({0: 1, 1: 0}, {0: (50 * GIB, 100 * GIB)}, False, id="a device that is not ours is not asked"),
    ],
)
def test_low_memory_is_read_from_the_devices_in_use(monkeypatch, reserved, memory, expected):
    """Low is less than 5 % or 512 MiB, on a device where this process holds memory."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reserved))
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.__getitem__)
    assert is_oom(AMBIGUOUS["cuDNN unsupported"]) is expected


def oom() -> BaseException:
    """A fresh one, as a chain writes into its links."""
    return torch.OutOfMemoryError(CUDA_OOM)


def sticky() -> BaseException:
    """A fresh error after which the CUDA context is gone."""
    return accelerator_error("CUDA error: device-side assert triggered", 710)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: from_cause(ValueError("step failed"), oom()), True, id="raised from an OOM"),
        pytest.param(lambda: in_context(ValueError("step failed"), oom()), True, id="raised while handling an OOM"),
        pytest.param(lambda: from_cause(ValueError(), from_cause(KeyError(), oom())), True, id="two deep"),
        pytest.param(
            lambda: from_cause(in_context(ValueError(), oom()), None), False, id="from None hides the context"
        ),
        pytest.param(
            lambda: in_context(from_cause(ValueError(), KeyError()), oom()), False, id="a cause hides the context"
        ),
        pytest.param(lambda: in_context(sticky(), oom()), False, id="a sticky error after an OOM"),
        pytest.param(lambda: in_context(FATAL["NCCL"], oom()), False, id="a broken communicator after an OOM"),
        pytest.param(lambda: in_context(KeyboardInterrupt(), oom()), False, id="an interrupt while handling an OOM"),
        pytest.param(lambda: in_context(SystemExit(1), oom()), False, id="an exit while handling an OOM"),
        pytest.param(lambda: in_context(oom(), KeyboardInterrupt()), False, id="an OOM while handling an interrupt"),
        pytest.param(lambda: in_context(MemoryError(), oom()), True, id="Python's MemoryError while handling an OOM"),
    ],
)
def test_chains_are_read_as_a_traceback_shows_them(make, expected):
    """Causes and visible contexts count, hidden ones do not, and what is fatal anywhere is fatal."""
    assert is_oom(make()) is expected


@pytest.mark.parametrize(("second", "expected"), [(oom(), True), (ValueError("second"), False)])
def test_a_cycle_of_errors_ends(second, expected):
    """A chain that comes back to itself is walked once."""
    first = ValueError("first")
    first.__cause__, second.__cause__ = second, first
    assert is_oom(first) is expected
    assert describe_error(first)


OUTCOMES = {"oom": oom, "fatal": sticky, "interrupt": KeyboardInterrupt, "other": lambda: ValueError("other")}


@given(st.lists(st.sampled_from(sorted(OUTCOMES)), min_size=1, max_size=6), st.data())
def test_any_chain_is_an_oom_when_one_link_is_and_none_is_fatal(kinds, data):
    """However links are joined, one OOM makes the chain an OOM and one fatal link unmakes it."""
    chain = OUTCOMES[kinds[0]]()
    for kind in kinds[1:]:
        join = data.draw(st.sampled_from([from_cause, in_context]))
        chain = join(OUTCOMES[kind](), chain)
    assert is_oom(chain) is ("oom" in kinds and not {"fatal", "interrupt"} & set(kinds))


@given(st.text(), st.sampled_from([Exception, ValueError, KeyError, OSError, AssertionError, MemoryError, TypeError]))
def test_no_text_makes_another_type_an_oom(noise, kind):
    """Only a RuntimeError is read: what a user's own exception says about memory is the user's."""
    assert not is_oom(kind(f"{noise} {CUDA_OOM} {noise}"), memory_is_low=True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (oom(), f"OutOfMemoryError: {CUDA_OOM}"),
        (
            accelerator_error("\n  CUDA error: out of memory" + KERNEL_HINT),
            "AcceleratorError: CUDA error: out of memory",
        ),
        (from_cause(ValueError("step failed"), oom()), f"OutOfMemoryError: {CUDA_OOM}"),
        (from_cause(ValueError("x"), AMBIGUOUS["cuDNN engine"]), f"RuntimeError: {AMBIGUOUS['cuDNN engine']}"),
        (ValueError("no memory in it\nat all"), "ValueError: no memory in it"),
        (torch.OutOfMemoryError(), "OutOfMemoryError"),
    ],
)
def test_an_error_is_told_in_one_line(error, expected):
    """Type and first line of the link that tells of memory, or of the error itself."""
    assert describe_error(error) == expected


def test_nothing_of_an_error_is_kept():
    """After the except block no exception, frame or tensor lives on because of it, without any garbage collection."""

    class Watched(torch.OutOfMemoryError):
        pass

    alive: list[weakref.ref[object]] = []

    def step() -> None:
        activation = torch.zeros(3)
        alive.append(weakref.ref(activation))
        error = Watched(CUDA_OOM)
        alive.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error  # a frame that names its own exception is a cycle, which is not what is looked at here

    gc.collect()
    gc.disable()
    try:
        try:
            step()
        except Watched as error:
            found, reason = is_oom(error), describe_error(error)
            was_alive = [reference() is not None for reference in alive]
        assert found
        assert was_alive == [True, True]
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()
    assert reason == f"Watched: {CUDA_OOM}"


def raised_while_handling(handled: BaseException, call: Callable[[], object]) -> BaseException:
    """What a call raises inside somebody's ``except`` block, where Python writes the handled error behind it."""
    try:
        raise handled
    except BaseException:
        return raised_by(call)


def refuse():
    """A user's mistake that has nothing to do with memory."""
    raise ValueError("labels are out of range")


def refuse_in_turn():
    """The same, behind another error of its own."""
    try:
        raise KeyError("label")
    except KeyError:
        refuse()


def run_out():
    """Memory ends, and the user's code tells it in other words."""
    try:
        raise torch.OutOfMemoryError(CUDA_OOM)
    except torch.OutOfMemoryError as error:
        raise ValueError("the loss failed") from error


@pytest.mark.parametrize("call", [refuse, refuse_in_turn])
def test_an_oom_that_was_being_handled_before_does_not_count(call):
    """Trying again inside ``except torch.OutOfMemoryError`` makes no OOM of a later mistake, nor of its text."""
    handled = torch.OutOfMemoryError(CUDA_OOM)
    error = raised_while_handling(handled, call)
    assert is_oom(error)
    assert not is_oom(error, handled=handled)
    assert describe_error(error).startswith("OutOfMemoryError")
    assert describe_error(error, handled=handled) == "ValueError: labels are out of range"


@pytest.mark.parametrize("handled", [ValueError("before"), FATAL["assert"], torch.OutOfMemoryError(CUDA_OOM)])
def test_a_new_oom_counts_whatever_was_handled_before(handled):
    """Only what is behind the handled error is left out: the attempt's own OOM stays one, and is the one described."""
    error = raised_while_handling(handled, run_out)
    assert is_oom(error, handled=handled)
    assert describe_error(error, handled=handled) == f"OutOfMemoryError: {CUDA_OOM}"


def test_the_error_itself_counts_even_where_it_is_the_handled_one():
    """An attempt that raises the handled object again has raised it."""
    error = torch.OutOfMemoryError(CUDA_OOM)
    assert is_oom(error, handled=error)
    assert describe_error(error, handled=error) == f"OutOfMemoryError: {CUDA_OOM}"
    error = raised_by(run_out)
    assert is_oom(error)
    assert not is_oom(error, handled=error)  # what lies behind it was there before


@pytest.mark.parametrize("value", [None, CUDA_OOM, torch.OutOfMemoryError, 5])
def test_what_is_no_exception_is_no_oom(value):
    """A text, a class or nothing at all: no error was raised."""
    assert is_oom(value) is False
