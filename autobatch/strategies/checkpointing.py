"""Runs chosen blocks of a model in ways that keep fewer activations: recomputed whole or in part, or offloaded.

``torch.utils.checkpoint``, or what copies to the host, stands around the forward pass of each block only while the step
runs: between steps, and in copies of the model, nothing has changed. The backward pass needs no more, since torch keeps
what it calls again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from autobatch._formatting import plural
from autobatch._user_errors import contextmanager
from autobatch.errors import InvalidArgument
from autobatch.records import Checkpointing, Way
from autobatch.step.model_info import is_compiled
from autobatch.step.whole_batch import WholeBatch
from autobatch.step.workload import Workload
from autobatch.strategies.choice import Ways, whole
from autobatch.strategies.offloading import HostRoom, offloading

Forward = Callable[..., Any]

_COSTLY = "aten::mm", "aten::addmm", "aten::convolution", "aten::_scaled_dot_product"
"""Operators whose results a selective way keeps. Not ``bmm``: the scores of an attention in parts are quadratic."""


def checkpointed(workload: Workload, chosen: Checkpointing | None, recomputable: Sequence[str] = ()) -> Workload:
    """Return the workload whose step recomputes the chosen blocks, and can recompute the others where memory ends.

    Raises:
        InvalidArgument: A chosen block is not in the model, or the model is compiled.
    """
    can_switch = not is_compiled(workload.model, workload.step)
    if chosen is not None and not can_switch:
        raise InvalidArgument(
            f"the plan changes how {plural(len(chosen.blocks), 'block')} run, which is not supported with "
            f"torch.compile: pass the model that is not compiled, or run fit() without strategies="
        )
    known = {name for name, _ in workload.model.named_modules()}
    reserve = recomputable if can_switch and known.issuperset(recomputable) else ()
    ways = {} if chosen is None else chosen.ways
    return recompute(workload, ways, reserve) if ways or reserve else workload


def recompute(workload: Workload, ways: Ways, reserve: Sequence[str] = ()) -> Workload:
    """Return the workload whose step runs the modules of these names in these ways."""
    own = find_modules(workload.model, [*ways]), ways, find_modules(workload.model, reserve)
    step = workload.step
    if isinstance(step, WholeBatch):
        two_passes: Any = replace(step, represent=CheckpointedStep(step.represent, *own))
        return workload.around(two_passes, weigh=workload.weigh)
    return workload.around(CheckpointedStep(step, *own), weigh=workload.weigh)


def recompute_more(workload: Workload) -> int:
    """Let the step recompute the blocks in reserve; return the number of blocks that it did not recompute whole yet."""
    step = _find_step(workload)
    return 0 if step is None or is_compiled(workload.model) else step.recompute_more(workload.model)


def explain_recomputed(workload: Workload) -> str:
    """Return a part of a message that says how many blocks the step recomputes and offloads; empty if none."""
    step = _find_step(workload)
    ways = [] if step is None else [*step.ways.values()]
    moved = ways.count("offload")
    counts = {"recomputed": len(ways) - moved, "offloaded": moved}
    return "".join(f"; already {what}: {plural(count, 'block')}" for what, count in counts.items() if count)


def _find_step(workload: Workload) -> CheckpointedStep | None:
    step: Any = workload.step
    step = step.represent if isinstance(step, WholeBatch) else step
    return step if isinstance(step, CheckpointedStep) else None


def find_modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules())
    if missing := [name for name in names if name not in known]:
        raise InvalidArgument(
            f"the plan changes how {plural(len(names), 'block')} run, and {type(model).__name__} has no {missing[0]}: "
            f"pass the model that the plan was made for, or run fit() again"
        )
    return {name: known[name] for name in names}


@dataclass(eq=False)
class CheckpointedStep:
    """A step that runs some blocks in ways that keep fewer activations.

    Attributes:
        step: The step itself.
        blocks: Modules of these blocks, by name; none is inside another.
        ways: Way of each.
        reserve: Modules that are recomputed too after ``recompute_more``.
    """

    step: Callable[[nn.Module, Any], Any]
    blocks: Mapping[str, nn.Module]
    ways: Ways
    reserve: Mapping[str, nn.Module]

    def recompute_more(self, model: nn.Module) -> int:
        """Recompute those in reserve that may be, whole; return the number of blocks that were not yet."""
        more = {
            name: one
            for name, one in self.reserve.items()
            if self.ways.get(name) != "checkpoint" and _may_run(model, name, one)
        }
        self.blocks, self.ways = {**self.blocks, **more}, {**self.ways, **whole(more)}
        vars(self).pop("_norms", None)
        return len(more)

    @cached_property
    def _norms(self) -> list[_BatchNorm]:
        recomputed = [block for name, block in self.blocks.items() if self.ways[name] != "offload"]
        return [one for block in recomputed for one in _find_norms(block)]

    @cached_property
    def _room(self) -> HostRoom:
        return HostRoom.read()  # once: torch keeps what it has pinned

    def __call__(self, model: nn.Module, samples: Any) -> Any:
        """Return what the step returns.

        Raises:
            InvalidArgument: A block is another module now, or has statistics that a recomputation would move again.
        """
        if any(one.training for one in self._norms):
            raise InvalidArgument(
                "a BatchNorm is in train mode in a block that is recomputed, so its statistics would move twice: set "
                "it to eval mode, as it was in fit(), or run fit() again"
            )
        for name, block in self.blocks.items():
            if _find(model, name) is not block:
                raise InvalidArgument(
                    f"the plan changes how {name} runs, and that block was replaced by another module since the "
                    f"Runner was made: run fit() again"
                )
        ways = {block: self.ways[name] for name, block in self.blocks.items()}
        room = replace(self._room) if "offload" in ways.values() else HostRoom(0)

        def around(block: nn.Module, forward: Forward) -> Forward:
            way = ways[block]
            return offloading(block, forward, room) if way == "offload" else recomputing(forward, way)

        with replaced_forward([*ways], around):
            return self.step(model, samples)


def _may_run(model: nn.Module, name: str, block: nn.Module) -> bool:
    """Return whether a block is the one of this name and has no statistics that a recomputation would move again."""
    return _find(model, name) is block and not any(one.training for one in _find_norms(block))


def _find_norms(block: nn.Module) -> list[_BatchNorm]:
    return [one for one in block.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


@contextmanager
def replaced_forward(blocks: Sequence[nn.Module], around: Callable[[nn.Module, Forward], Forward]) -> Iterator[None]:
    """Let each block call ``around(block, its forward)`` in place of its forward pass, inside this block."""
    earlier = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            vars(block)["forward"] = around(block, block.forward)  # no parameter or buffer: no name changes
        yield
    finally:
        for block, own in zip(blocks, earlier, strict=True):
            if own is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = own


def recomputing(forward: Forward, way: Way) -> Forward:
    """Return a forward pass that keeps its inputs, and costly results in a selective way; the rest runs again."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    make_contexts = _keep_costly if way == "selective" else noop_context_fn
    # All inputs as arguments: torch saves the generators of the devices that it finds among these.
    return lambda *args, **kwargs: checkpoint(
        run, args, kwargs, use_reentrant=False, preserve_rng_state=True, context_fn=make_contexts
    )


def _keep_costly() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    keeping, using = create_selective_checkpoint_contexts(_keep)
    return keeping, _FirstTime(using)


class _FirstTime:
    """A context of the first recomputation, which takes what was kept; any further backward pass recomputes all."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._left: list[AbstractContextManager[Any]] = [inner]
        self._now: Any = nullcontext()

    def __enter__(self) -> None:
        self._now = self._left.pop() if self._left else nullcontext()
        self._now.__enter__()

    def __exit__(self, *error: object) -> None:
        self._now.__exit__(*error)


def _keep(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_costly = operator.name().startswith(_COSTLY)
    # An attention with dropout draws (its only positional float): were it not run again, later layers would draw
    # other numbers than before.
    dropout = kwargs.get("dropout_p", 0.0) or sum(one for one in args if isinstance(one, float))
    return CheckpointPolicy.MUST_SAVE if is_costly and not dropout else CheckpointPolicy.PREFER_RECOMPUTE
