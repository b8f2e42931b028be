"""Checks a Runner's plan, makes its accumulation, and describes what must be equal on each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autobatch._arguments import is_instance_with
from autobatch._formatting import name_type, plural
from autobatch._wrappers import members_of
from autobatch.batch.cut import Division
from autobatch.distributed.ranks import Ranks, describe_parameters, digest_values, refuse_differences
from autobatch.distributed.sharded import divisor_of
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.plan import Plan
from autobatch.step.default_step import default_step
from autobatch.step.model_info import name_optimizer
from autobatch.step.whole_batch import refuse_sharded
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.strategies.checkpointing import checkpointed
from autobatch.strategies.chunked_loss import chunked
from autobatch.torch_internals.storages import has_shards
from autobatch.training.batches import find_bound
from autobatch.training.given_backward import Backward, GivenBackward
from autobatch.training.lockstep_accumulation import LockstepAccumulation
from autobatch.training.rank_accumulation import RankAccumulation
from autobatch.training.whole_batch import accumulation_for

_RATES_SHOWN = 3

_NOT_COMPARED = {"params", "foreach", "fused", "capturable"}
"""Of a group of an optimizer: the parameters are compared by themselves, the others do not change what is computed."""


def check_plan(plan: Any, weigh: Any) -> None:
    """Refuse an object that is not a plan, or a plan that was made with ``weigh`` if the Runner has none."""
    if not isinstance(plan, Plan):
        if isinstance(getattr(plan, "plan", None), Plan) or type(plan).__name__ == "Prediction":
            raise InvalidArgument(f"plan is {name_type(plan)}: pass prediction.plan, which is None if nothing fits")
        raise InvalidArgument(f"plan is {name_type(plan)}: pass what fit() returned, or Plan.load(path)")
    if plan.weighed and weigh is None:
        raise InvalidArgument("the plan was made with weigh=, and this Runner has none: pass the same weigh= to both")


def check_rank(plan: Plan, rank: int, size: int) -> None:
    """Refuse a plan of another number of ranks, or another rank's."""
    if plan.world_size != size:
        ranks, running = plural(plan.world_size, "rank"), "1 is" if size == 1 else f"{size} are"
        raise InvalidArgument(f"the plan is for {ranks}, and {running} running: run fit() again")
    if plan.rank != rank:
        raise InvalidArgument(
            f"the plan is that of rank {plan.rank} of the model's process group, and this is rank {rank} of it: pass "
            f"each rank its own"
        )


def make_workload(plan: Plan, model: nn.Module, step: Step | None, weigh: Weigh | None, optimizer: Any) -> Workload:
    """Return the workload of a Runner; its step uses the plan's strategies, and recomputes more if memory ends."""
    workload = Workload(model, default_step if step is None else step, weigh, optimizer, "autobatch.Runner")
    return checkpointed(chunked(workload, plan.chunked_loss), plan.checkpointing, plan.recomputable)


def make_accumulation(
    plan: Plan,
    workload: Workload,
    device: Device,
    *,
    is_sharded: bool,
    division: Division,
    scaler: Any | None,
    keep: Sequence[Any],
    backward: Backward | None,
) -> RankAccumulation:
    if is_sharded:
        refuse_sharded(workload.step)
    return (LockstepAccumulation if is_sharded else accumulation_for(workload))(
        workload,
        device,
        _begin_sharded_scaling(workload.model, scaler) if is_sharded else _begin_scaling(scaler, device),
        in_float32=plan.accumulate_in_float32,
        division=division,
        max_micro_batch=find_bound(plan),
        smallest=plan.smallest_micro_batch,
        share=sum(plan.micro_batch_sizes),
        target=plan.target_batch,
        keep=keep,
        backward=None if backward is None else GivenBackward(backward, is_scaled=scaler is not None),
        is_training=True,
    )


_HELD = ("what the parameters hold", "what the optimizer holds")
_DEVICE = "the device"


def describe_binding(
    plan: Plan, workload: Workload, device: Device, max_grad_norm: float | None, **given: Any
) -> dict[str, Any]:
    """Describe what must be the same on each rank, and the device of each."""
    schedulers, scaler = given.pop("schedulers"), given.pop("scaler")
    given |= {"weigh": workload.weigh}
    return {
        _DEVICE: f"{device.describe().name}, {torch.get_num_threads()} threads",
        "plan.target_batch": plan.target_batch,
        "plan.accumulate_in_float32": plan.accumulate_in_float32,
        "max_grad_norm=": None if max_grad_norm is None else float(max_grad_norm),
        "the model": describe_parameters(workload.model, workload.parameters()),
        "what the parameters hold": digest_values(workload.parameters())[:8],
        "optimizer=": name_optimizer(workload.optimizer) or "None",
        "what the optimizer was given": _describe_groups(workload),
        "what the optimizer holds": _describe_state(workload.optimizer),
        "scaler=": "None" if scaler is None else _describe_scaler(scaler),
        "scheduler=": " + ".join(map(_describe_scheduler, schedulers)) or "None",
        **{f"{name}=": "None" if value is None else type(value).__name__ for name, value in given.items()},
    }


def refuse_unlike_bindings(gathered: Sequence[Mapping[str, Any]], ranks: Ranks | None) -> None:
    """Refuse ranks whose parameters would move apart, or have.

    Values are compared bit for bit if all ranks compute on the same kind of device. Unlike devices round differently,
    so their parameters move apart by a little in any training.
    """
    are_alike = len({one[_DEVICE] for one in gathered}) < 2
    left_out = (_DEVICE,) if are_alike else (_DEVICE, *_HELD)
    refuse_differences([{name: one[name] for name in one if name not in left_out} for one in gathered], ranks)


def _describe_groups(workload: Workload) -> str:
    """Describe settings with which two ranks would move their parameters apart, with equal gradients."""
    groups = [] if workload.optimizer is None else workload.optimizer.param_groups
    settings = [
        {key: _read_setting(value) for key, value in group.items() if key not in _NOT_COMPARED} for group in groups
    ]
    places = {parameter: place for place, parameter in enumerate(workload.parameters())}
    parts = [[(places[parameter], parameter.requires_grad) for parameter in group["params"]] for group in groups]
    digest = hashlib.sha256(repr(([sorted(one.items()) for one in settings], parts)).encode()).hexdigest()[:8]
    rates = [one["lr"] for one in settings if "lr" in one]
    shown = ", ".join(map(str, rates[:_RATES_SHOWN])) + (", ..." if len(rates) > _RATES_SHOWN else "")
    return f"{plural(sum(len(group['params']) for group in groups), 'parameter')}, lr {shown or 'None'}, {digest}"


def _describe_state(optimizer: Any | None) -> str:
    """Describe the state, which differs if a checkpoint was loaded on some ranks only.

    Only torch's own optimizers are read: others may divide their state among the ranks. Sharded state is left out, too.
    """
    members = [one for one in members_of(optimizer) if f"{type(one).__module__}.".startswith("torch.optim.")]
    held: list[torch.Tensor | None] = []
    settings: list[Any] = []
    for member in members:
        for parameter in (parameter for group in member.param_groups for parameter in group["params"]):
            entry: dict[str, Any] = member.state.get(parameter, {})
            tensors = {name: value for name, value in sorted(entry.items()) if isinstance(value, torch.Tensor)}
            held += () if has_shards(parameter) else tensors.values()
            settings.append([(name, name in tensors or _read_setting(value)) for name, value in sorted(entry.items())])
    if not any(settings):
        return "nothing"
    return hashlib.sha256(repr((settings, digest_values(held))).encode()).hexdigest()[:8]


def _describe_scheduler(scheduler: Any) -> str:
    state = scheduler.state_dict() if is_instance_with(scheduler, "state_dict") else {}
    digest = hashlib.sha256(repr(_read_setting(state)).encode()).hexdigest()[:8]
    return f"{type(scheduler).__name__} {digest}"


def _read_setting(value: Any) -> Any:
    """A plain value, also of a tensor; of another object only its type."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(str(key), _read_setting(one)) for key, one in value.items()]
    if isinstance(value, tuple | list):
        return [*map(_read_setting, value)]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def _describe_scaler(scaler: Any) -> str:
    """A scale of its own would make a rank's gradients count for more in the sum than another's."""
    state = scaler.state_dict() if is_instance_with(scaler, "state_dict") else {}
    digest = hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()[:8]
    return f"{type(scaler).__name__}, scale {scaler.get_scale()}, {digest}"


def _begin_scaling(
    scaler: torch.amp.GradScaler | None, device: Device
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The scaler's ``scale``; its two tensors are made now, as memory that ends between them would break it."""
    if scaler is None:
        return None
    if scaler.is_enabled():
        scaler.scale(torch.zeros((), device=device.torch_device))
    return scaler.scale


def _begin_sharded_scaling(model: nn.Module, scaler: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Losses are multiplied by what torch divides the sum of the ranks' gradients by."""
    if scaler is not None:
        raise InvalidArgument(
            "scaler= is not supported where parameters are sharded: train in bfloat16, as with "
            "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    divisor = divisor_of(model)
    return lambda loss: loss * divisor
