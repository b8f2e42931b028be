"""Decides whether an exception is an out-of-memory error, and describes it without keeping it alive.

By tables: types first, then texts; exception groups are not looked into. Nothing here holds an exception: its traceback
would keep the failed step's tensors alive.
"""

from __future__ import annotations

import torch

__all__ = ["describe_error", "ends_context", "is_oom"]

# torch.AcceleratorError carries the runtime's own number (cudaError_t, which HIP shares for these).
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
    # The communicator's state is unknown: other ranks may wait forever for this one.
    "NCCL error",
    "NCCL Error",
    "ncclUnhandledCudaError",
    # The loader's own memory ended, which no smaller micro-batch gives back.
    "in DataLoader worker process",
    "in pin memory thread",
)
_OUT_OF_MEMORY_TEXTS = (
    "out of memory. Tried to allocate",  # every caching allocator built like CUDA's: HIP, XPU, NPU...
    "MPS backend out of memory",
    "Invalid buffer size: ",  # MPS: one tensor beyond what Metal gives at once
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
# Each has causes beside memory (an unsupported shape, a broken installation), so memory has to be low as well.
_AMBIGUOUS_TEXTS = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUFFT_INTERNAL_ERROR",
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # the allocator's own report of an OOM failed, as on Jetson
)

_LOW_FRACTION = 0.05
_LOW_BYTES = 512 * 1024**2


def is_oom(error: object, *, memory_is_low: bool | None = None, handled: BaseException | None = None) -> bool:
    """Whether an error means that memory ended and that less work at once may go through.

    The error itself and whatever it was raised from count: ``__cause__``, or ``__context__`` where ``from None`` does
    not hide it. Texts count only on ``RuntimeError`` (``torch.OutOfMemoryError`` and ``torch.AcceleratorError`` are
    such), so a ``ValueError`` that mentions memory is not one. Python's ``MemoryError``, overflowing sizes and Triton's
    ``OutOfResources`` (shared memory of a kernel) are not: a smaller batch does not cure them. Errors that end the CUDA
    context or a communicator are not, even where an OOM led to them, and neither is an interrupt.

    Args:
        error: What was raised; no reference to it stays. What is no exception is no OOM.
        memory_is_low: Decides errors that mean an OOM only sometimes, such as ``CUDNN_STATUS_NOT_SUPPORTED``. ``None``
            asks the CUDA devices that this process uses: low is less than 5 % of the device or 512 MiB, whichever is
            more. Without an initialised CUDA it is not low.
        handled: What was already being handled when the attempt began: ``sys.exc_info()[1]``, taken before the ``try``.
            Python makes it the context of every error that is raised meanwhile, so it and what it was raised from do
            not count.

    Returns:
        Whether it is worth trying again with fewer samples.
    """
    chain = _unchain(error, handled) if isinstance(error, BaseException) else []
    if any(_is_fatal(link) for link in chain):
        return False
    if any(_means_oom(link) for link in chain):
        return True
    if not any(_contains(link, _AMBIGUOUS_TEXTS) for link in chain):
        return False
    return _any_device_is_low() if memory_is_low is None else memory_is_low


def ends_context(error: BaseException, *, handled: BaseException | None = None) -> bool:
    """Whether nothing can run any more after this error in this process: a CUDA context or a communicator is lost."""
    return any(_is_fatal(link) for link in _unchain(error, handled))


def describe_error(error: BaseException, *, handled: BaseException | None = None) -> str:
    """Type and first line of an error, for a log: ``"OutOfMemoryError: CUDA out of memory. Tried to..."``.

    Of a chain it is the link that ``is_oom`` recognises, or ``error`` itself where none is; ``handled`` is as there.
    """
    chain = _unchain(error, handled)
    [link, *_] = [e for e in chain if _means_oom(e)] or [e for e in chain if _contains(e, _AMBIGUOUS_TEXTS)] or chain
    line = next((line.strip() for line in str(link).splitlines() if line.strip()), "")
    return f"{type(link).__name__}: {line}" if line else type(link).__name__


def _unchain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """The error and what it was raised from, outermost first, as a traceback would show them, down to ``handled``."""
    chain = [error]
    while chain[-1] is not handled:  # where it is the error itself, raised once more: it counts, what is behind not
        # Setting a cause, also the None of `from None`, suppresses the context.
        link = chain[-1].__cause__ if chain[-1].__suppress_context__ else chain[-1].__context__
        # By identity: an exception class may compare its instances as it likes.
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
        # Only where this process holds something: asking another device would create a context on it.
        used = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
        readings = [torch.cuda.mem_get_info(index) for index in used]
    except RuntimeError:  # a device that does not even answer is not one to retry on
        return False
    return any(free < max(_LOW_FRACTION * total, _LOW_BYTES) for free, total in readings)
