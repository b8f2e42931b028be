"""Checks the arguments of ``map``, and finds the device of its pieces and the modules that they reach."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autobatch._formatting import name_type, show_value
from autobatch.batch.samples import refuse_meta
from autobatch.distributed.ranks import world_size
from autobatch.distributed.sharded.model import is_sharded
from autobatch.errors import InvalidArgument
from autobatch.inference.samples import are_samples
from autobatch.memory.device import Device
from autobatch.memory.devices import device_for, is_here, open_device, refuse_meta_model
from autobatch.step.reachable import MOST_OBJECTS, find_modules

logger = logging.getLogger("autobatch")


def check_functions(fn: Any, batch: Any, collate: Any, on_result: Any) -> None:
    """Refuse what cannot be called, and a ``collate`` where there is nothing to collate."""
    for name, value in (("fn", fn), ("collate", collate), ("on_result", on_result)):
        if not callable(value) and (value is not None or name == "fn"):
            raise InvalidArgument(f"{name}={show_value(value)} must be a function")
    if isinstance(fn, type) and issubclass(fn, nn.Module):
        raise InvalidArgument(f"fn={name_type(fn)} has no weights yet: pass an instance of it")
    if collate is not None and (isinstance(batch, DataLoader) or not are_samples(batch)):
        raise InvalidArgument(f"collate= is for samples, and {name_type(batch)} has batches: leave it out")


def find_runnable(fn: Any) -> Sequence[nn.Module]:
    """Return the modules that a function reaches; refuse those that cannot be run piece by piece."""
    modules = find_modules(fn, _warn_of_more_objects)
    name = next((type(module).__name__ for module in modules if is_sharded(module)), None)
    if name is not None and world_size() > 1:
        raise InvalidArgument(
            f"map() cannot run {name}, whose parameters are sharded: ranks gather them together in each forward pass, "
            f"and each would run another number of pieces: map in one process with the whole weights, or call the "
            f"model on equally many batches on each rank"
        )
    _refuse_empty(fn)
    return modules


@cache  # once: a loop may map thousands of batches
def _warn_of_more_objects() -> None:
    logger.warning(
        "map: fn reaches more than %s objects, and the rest was not searched for modules: any there keeps "
        "its mode, also train mode; pass the module itself as fn, hold fewer objects beside it, or call .eval() on it",
        f"{MOST_OBJECTS:,}",
    )


def find_device(device: Any, modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor]) -> Device:
    """Return the device of the pieces: the given one, else that of the modules, else that of the batch."""
    samples = [*tensors]
    for tensor in samples:
        refuse_meta(tensor)
    if device is not None:
        return open_device(device)
    own = [(tensor.device, module) for module in modules for tensor in tensors_of(module)]
    homes = [home for home, _ in own if home.type != "meta"]
    if own and not homes:
        raise InvalidArgument(
            f"device= is needed: {type(own[0][1]).__name__} is on the meta device, which does not say where its passes "
            f"run; pass the device that its weights are brought to"
        )
    homes += [tensor.device for tensor in samples]
    return device_for(homes[0] if homes else torch.device("cpu"))


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """List the parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def _refuse_empty(fn: Any) -> None:
    """Refuse a model without values, unless hooks may bring them in for each pass, as those of accelerate do."""
    if not isinstance(fn, nn.Module):  # a function may call its model with weights from elsewhere
        return
    tensors = tensors_of(fn)
    has_hooks = any(one._forward_pre_hooks or "forward" in vars(one) for one in fn.modules())  # noqa: SLF001
    if tensors and all(tensor.is_meta for tensor in tensors) and not has_hooks:
        refuse_meta_model(type(fn).__name__)


def read_target(to: Any) -> torch.device | None:
    """Return the device of the results; ``None``: they stay where they are."""
    if to is None:
        return None
    try:
        device = torch.device(to)
    except (RuntimeError, TypeError):
        raise InvalidArgument(f"to={show_value(to)} is no device: pass one such as 'cpu', or leave it out") from None
    if device.type == "meta":
        raise InvalidArgument(f"to={show_value(to)} would drop all values: pass a device with memory, such as 'cpu'")
    if not is_here(device):
        raise InvalidArgument(f"to={show_value(to)} is not here: torch has no memory of it in this process")
    return device
