"""Refuses trainings that cannot be split exactly, as Trainer and module show before training."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from autobatch.errors import InvalidArgument
from autobatch.step.workload import Workload

_STRATEGIES = frozenset(("SingleDeviceStrategy", "DDPStrategy"))
_CHANGES_THE_TARGET = {
    "BatchSizeFinder": "changes the target batch; leave it out, autobatch replaces it",
    "GradientAccumulationScheduler": "changes the target batch while training; leave it out",
}


def refuse_unsupported(trainer: Any, module: Any) -> None:
    """Raise InvalidArgument for a training whose steps cannot run in micro-batches of any size."""
    strategy, reason = type(trainer.strategy).__name__, ""
    changing = [kind for kind in (type(one).__name__ for one in trainer.callbacks) if kind in _CHANGES_THE_TARGET]
    if not module.automatic_optimization:
        reason = (
            "manual optimization: your training_step owns the loop; let Lightning step the optimizer "
            "(automatic_optimization = True), or leave this callback out and use autobatch.Runner in training_step"
        )
    elif "dataloader_iter" in inspect.signature(module.training_step).parameters:
        reason = (
            "training_step(dataloader_iter) fetches its own batches, which cannot be divided; take (batch, batch_idx)"
        )
    elif "DeepSpeed" in strategy:
        reason = f"{strategy} owns the backward pass and counts its calls; use plan.settings('deepspeed')"
    elif "FSDP" in strategy or "ModelParallel" in strategy:
        reason = (
            f"{strategy} gathers parameters inside the passes, where ranks that run different micro-batches would wait "
            f"for each other; use strategy='ddp'"
        )
    elif strategy not in _STRATEGIES:
        reason = f"{strategy} is not supported; use one device or strategy='ddp', or plan.settings('lightning')"
    elif changing:
        reason = f"{changing[0]} {_CHANGES_THE_TARGET[changing[0]]}"
    if reason:
        raise InvalidArgument(f"{type(module).__name__}: {reason}")
    refuse_accumulation(trainer, module)


def refuse_accumulation(trainer: Any, module: Any) -> None:
    """Raise InvalidArgument if Lightning adds up batches: it would divide each by their number."""
    if trainer.accumulate_grad_batches != 1:
        raise InvalidArgument(
            f"{type(module).__name__}: accumulate_grad_batches={trainer.accumulate_grad_batches} counts each batch the "
            f"same, whatever its size; give the DataLoader the whole batch, and leave accumulate_grad_batches out"
        )


def refuse_optimizer(optimizer: Any, module: Any) -> None:
    """Raise InvalidArgument for an optimizer that runs several closures or inside the backward pass, and for none."""
    name = type(module).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            f"{name}: LBFGS runs training_step several times in a step, with parameters that move; choose another "
            f"optimizer"
        )
    if type(optimizer).__name__ == "_MockOptimizer":  # Lightning's own, where there is none
        raise InvalidArgument(f"{name}.configure_optimizers() returned no optimizer: there is no step to divide")
    Workload(module, module.training_step)  # refuses hooks on gradients


def refuse_target(target: int, samples: int, ranks: int, loader: Any) -> None:
    """Raise InvalidArgument where the loader's batches are not this rank's share of the target."""
    share, rest = divmod(target, ranks)
    if rest:
        raise InvalidArgument(
            f"target_batch={target} over {ranks} ranks: the loader gives each rank equally many samples; pass a "
            f"multiple of {ranks}"
        )
    size = getattr(loader, "batch_size", None) or samples
    if size != share:
        where = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise InvalidArgument(
            f"target_batch={target}, and the loader gives {size} samples at once{where}: give the DataLoader "
            f"batch_size={share}, which autobatch divides, or leave target_batch out"
        )
