"""Decides whether an exception is an out-of-memory error, and describes it without keeping it alive.

Tables decide: types first, then texts. Exception groups are not opened. Nothing here holds an exception, since its
traceback would keep the failed step's tensors alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autobatch.errors import DoesNotFit

_T = TypeVar("_T")

# torch.AcceleratorError has the runtime's number (cudaError_t; HIP has the same numbers).
_OUT_OF_MEMORY_CODE = 2
# After these the CUDA documentation asks for a new process: ECC, illegal address, launch timeout, destroyed context,
# assert, hardware stack, illegal instruction, misaligned address, address space, program counter, launch failure.
_STICKY_CODES = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})

_FATAL_TEXTS = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "unspecified launch failure",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "uncorrectable ECC error",
    "launch timed out and was terminated",
    # The communicator's state is unknown, and other ranks may wait forever for this one.
    "NCCL error",
    "NCCL Error",
    "ncclUnhandledCudaError",
    # The loader ran out of memory, and a smaller micro-batch does not help it.
    "in DataLoader worker process",
    "in pin memory thread",
)
_OUT_OF_MEMORY_TEXTS = (
    "out of memory. Tried to allocate",  # every caching allocator modeled on CUDA's: HIP, XPU, NPU...
    "MPS backend out of memory",
    "Invalid buffer size: ",  # MPS: one tensor larger than Metal allows
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, hipBLAS
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "PT_DEVMEM Allocation failed",  # Gaudi
    "DefaultCPUAllocator: can't allocate memory",
    "not enough memory: you tried to allocate",  # the CPU allocator on Windows
)
# Each has other causes too (an unsupported shape, a broken installation), so memory has to be low as well.
_AMBIGUOUS_TEXTS = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUFFT_INTERNAL_ERROR",
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # the allocator failed to report an OOM, as on Jetson
)

_LOW_FRACTION = 0.05
_LOW_BYTES = 512 * 1024**2


def is_oom(error: object, *, memory_is_low: bool | None = None, handled: BaseException | None = None) -> bool:
    """Return whether an error means out of memory, so that fewer samples may fit.

    The error counts, and so do the errors it was raised from: ``__cause__``, or ``__context__`` unless ``from None``
    hides it. Texts count only on a ``RuntimeError``; ``torch.OutOfMemoryError`` and ``torch.AcceleratorError`` are
    subclasses. A smaller batch does not cure Python's ``MemoryError``, overflowing sizes and Triton's
    ``OutOfResources`` (shared memory of a kernel), so these return False. So does an error that ends the CUDA context
    or a communicator, even if an OOM led to it, and so does an interrupt.

    Args:
        error: The error. Other objects than exceptions return False.
        memory_is_low: Decides errors that mean an OOM only sometimes, such as ``CUDNN_STATUS_NOT_SUPPORTED``. ``None``
            asks the CUDA devices that this process uses: low is less than 5 % of the device or 512 MiB, whichever is
            more. Memory is not low if CUDA is not initialized.
        handled: The exception that was being handled when the attempt began: ``sys.exc_info()[1]`` before the ``try``.
            Python makes it the context of every later error, so it does not count, and neither do its causes.

    Returns:
        Whether to try again with fewer samples.
    """
    chain = _unchain(error, handled) if isinstance(error, BaseException) else []
    if any(_is_fatal(link) for link in chain):
        return False
    if any(_means_oom(link) for link in chain):
        return True
    if not any(_contains(link, _AMBIGUOUS_TEXTS) for link in chain):
        return False
    return _any_device_is_low() if memory_is_low is None else memory_is_low


def ends_context(error: BaseException) -> bool:
    """Return whether nothing can run in this process after this error: a CUDA context or a communicator is lost."""
    return any(_is_fatal(link) for link in _unchain(error, None))


def describe_error(error: BaseException, *, handled: BaseException | None = None) -> str:
    """Return type and first line of an error, for a log; of a chain, those of the link that ``is_oom`` recognizes."""
    chain = _unchain(error, handled)
    [link, *_] = [e for e in chain if _means_oom(e)] or [e for e in chain if _contains(e, _AMBIGUOUS_TEXTS)] or chain
    line = next((line.strip() for line in str(link).splitlines() if line.strip()), "")
    return f"{type(link).__name__}: {line}" if line else type(link).__name__


def try_twice(reclaim: Callable[[], None], purpose: str, action: Callable[..., _T], *arguments: Any) -> _T:
    """Do what takes little memory; if memory runs out, try again after all caches are given back.

    Raises:
        DoesNotFit: Memory ran out twice.
    """
    handled = sys.exc_info()[1]
    for _ in range(2):
        try:
            return action(*arguments)
        except Exception as error:
            if not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        reclaim()  # after the ``except`` block, where the failed frames are gone
    raise DoesNotFit(f"ran out of memory while {purpose} ({reason}); the step was undone")


def _unchain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """Return the error and its causes down to ``handled``, outermost first, as a traceback shows them."""
    chain = [error]
    while chain[-1] is not handled:  # if it is the error itself, raised again, it counts and its causes do not
        # A cause suppresses the context, and so does `from None`.
        link = chain[-1].__cause__ if chain[-1].__suppress_context__ else chain[-1].__context__
        # By identity, since an exception class may define its own comparison.
        if link is None or link is handled or any(link is seen for seen in chain):
            break
        chain.append(link)
    return chain


def _is_fatal(error: BaseException) -> bool:
    # torch builds without distributed lack the class.
    distributed: type[BaseException] | tuple[()] = getattr(torch.distributed, "DistError", ())
    return (
        not isinstance(error, Exception)
        or isinstance(error, distributed)
        or _code(error) in _STICKY_CODES
        or _contains(error, _FATAL_TEXTS)
    )


def _means_oom(error: BaseException) -> bool:
    return (
        isinstance(error, torch.OutOfMemoryError)
        or _code(error) == _OUT_OF_MEMORY_CODE
        or _contains(error, _OUT_OF_MEMORY_TEXTS)
    )


def _contains(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _code(error: BaseException) -> int | None:
    return getattr(error, "error_code", None) if isinstance(error, torch.AcceleratorError) else None


def _any_device_is_low() -> bool:
    if not torch.cuda.is_initialized():
        return False
    try:
        # Only devices in use: a question to another one would create a context on it.
        used = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
        readings = [torch.cuda.mem_get_info(index) for index in used]
    except RuntimeError:  # a device without an answer is not one to retry on
        return False
    return any(free < max(_LOW_FRACTION * total, _LOW_BYTES) for free, total in readings)
