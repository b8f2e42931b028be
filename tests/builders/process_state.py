"""``read_process_state``: what belongs to the whole process, or to this thread, and could be left changed."""

from __future__ import annotations

import gc
import logging
import signal
import sys

import torch
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch


def read_process_state():
    """By name; two readings are equal if nothing has changed."""
    logger = logging.getLogger("autobatch")
    return {
        "dispatch modes": _python_dispatch._get_current_dispatch_mode_stack(),
        "dispatch mode flags": {
            name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")
        },
        "function modes": _get_current_function_mode_stack(),
        "torch function enabled": torch._C._is_torch_function_enabled(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default dtype": torch.get_default_dtype(),
        # `set_default_device(None)` is not as before: with torch 2.8, `get_default_device` fails after it
        "default device": getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", "never set"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "autocast functions": [vars(torch.autocast)[name] for name in ("__init__", "__enter__", "__exit__")],
        "precision": list(_precisions()),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "module hooks": [
            len(getattr(module_hooks, name))
            for name in dir(module_hooks)
            if name.startswith("_global_") and name.endswith("hooks")
        ],
        "compiler": _compiler_stance(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "streams": (sys.stdout, sys.stderr),
        "logger": (logger.level, logger.propagate, logger.disabled, list(logger.handlers)),
    }


def _precisions():
    backends = torch.backends
    yield torch.get_float32_matmul_precision()
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # since torch 2.9
        for switch in (backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
            yield switch.fp32_precision
    else:
        yield backends.cuda.matmul.allow_tf32
    yield backends.cudnn.allow_tf32


def _compiler_stance():
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return "default" if eval_frame is None else eval_frame._stance.stance
