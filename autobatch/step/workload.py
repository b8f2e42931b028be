"""Calls the user's step and ``weigh``, and checks the model, the optimizer and the step's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autobatch._arguments import is_function_of, is_instance_with, takes_none
from autobatch._formatting import name_type, show_value
from autobatch._wrappers import members_of, state_of
from autobatch.batch.tree import call_read_only, map_tensors, tensors_of
from autobatch.errors import InvalidArgument
from autobatch.step.default_step import default_step
from autobatch.step.loop_guard import Owner, find_owners, refuse_hooks, refuse_loop_calls
from autobatch.step.losses import Term, read_terms, read_weights
from autobatch.step.losses import Weigh as Weigh  # noqa: PLC0414 - callers take both types from here
from autobatch.step.model_info import name_optimizer
from autobatch.step.reachable import find_outside
from autobatch.step.totals import refuse_totals
from autobatch.step.whole_batch import WholeBatch
from autobatch.torch_internals.storages import bytes_of, is_uninitialized

Step = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Workload:
    """A model, the user's step on it, the unit of its mean, and the optimizer.

    Attributes:
        step: The user's step, or ``default_step``.
        weigh: The user's count of a micro-batch; ``None``: samples.
        called_by: Public function that runs it, for notes on the user's errors.
        named: Name of the step there.
    """

    model: nn.Module
    step: Step
    weigh: Weigh | None = None
    optimizer: Any | None = None
    called_by: str = "autobatch"
    named: str = "your step(model, micro_batch)"

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a part of the wrong kind, or one that cannot be split exactly."""
        if self.step is default_step:
            vars(self)["named"] = "your model"
        check_model(self.model)
        if isinstance(self.step, type) or not callable(self.step):
            raise InvalidArgument(f"step={_show(self.step)} cannot be called; pass step(model, micro_batch) -> loss")
        check_weigh(self.weigh)
        if isinstance(self.step, WholeBatch):
            vars(self)["named"] = "your represent() or loss() of WholeBatch"
            if self.weigh is not None:
                raise InvalidArgument(
                    "weigh= is not used with WholeBatch, whose loss is over the whole batch: leave it out"
                )
        if self.optimizer is not None:
            _check_optimizer(self.model, self.optimizer)
        self.check_hooks()

    def check_hooks(self, known: frozenset[int] = frozenset()) -> None:
        """Refuse hooks on gradients of parameters, except those with a known key (``find_hooks``)."""
        names = {id(parameter): f"parameter {name}" for name, parameter in self.model.named_parameters()}
        for parameter in self.parameters():
            # No gradient reaches hooks of a frozen one; that of a lazy module gets its shape in the first forward pass.
            if parameter.requires_grad and not is_uninitialized(parameter):
                of_optimizer = f"the optimizer's parameter of shape {tuple(parameter.shape)}"
                refuse_hooks(names.get(id(parameter), of_optimizer), parameter, known)

    def around(self, step: Step, *, weigh: Weigh | None) -> Workload:
        """Return this workload with another step, which calls this one's; both share the search for optimizers."""
        outer = replace(self, step=step, weigh=weigh)
        vars(outer)["_owners"] = self._owners
        return outer

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of model and optimizer, each once, in the order of ``model.parameters()``."""
        return [*{id(one): one for one in self._owned()}.values()]

    def _owned(self) -> list[nn.Parameter]:
        """Return the parameters of model and optimizer; a shared one comes again."""
        # Not by model.parameters(), which makes a name for each: 2.4 times as long, in every step.
        owned: list[nn.Parameter | None] = []
        waiting: list[nn.Module | None] = [self.model]
        seen = set[int]()
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            if own := module._parameters:  # noqa: SLF001 - as above
                owned += own.values()
            if below := module._modules:  # noqa: SLF001 - as above
                waiting += reversed(below.values())
        return [one for one in owned if one is not None] + self.held_by_optimizer()

    def drop_gradients(self) -> None:
        """Drop every gradient; the parameters are looked up again, as a forward pass may have made some."""
        for parameter in self._owned():
            parameter.grad = None

    def count_trained(self) -> int:
        """Count the values of the parameters that the optimizer moves; those of lazy modules have none yet."""
        trained = [one for one in self.held_by_optimizer() if one.requires_grad]
        try:
            return sum([one.numel() for one in trained])
        except (NotImplementedError, RuntimeError, ValueError):  # asking first takes five times as long
            return sum(one.numel() for one in trained if not is_uninitialized(one))

    def count_trained_parameters(self) -> int:
        """Count the parameters that the optimizer moves."""
        return sum([one.requires_grad for one in self.held_by_optimizer()])

    def held_by_optimizer(self) -> list[nn.Parameter]:
        """Return the parameters in the optimizer's groups."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def resident_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that lives on the device between two steps, except batches."""
        for parameter in self.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        yield from self._state_tensors()

    def outside(self) -> list[nn.Module | torch.Tensor]:
        """Return modules and tensors in the step's reach that belong to neither the model nor the optimizer."""
        return find_outside(self.step, self.model)

    def state_bytes(self) -> int:
        return sum(bytes_of(tensor) for tensor in self._state_tensors())

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        # Nested, as some optimizers keep lists of directions.
        return tensors_of([*state_of(self.optimizer).values()])

    def weights_of(self, micro_batch: Any, samples: int) -> dict[str, float]:
        """Return the count of the micro-batch by term: ``weigh`` of it, or its samples; ``""`` means every term."""
        if self.weigh is None:
            return {"": float(samples)}
        return read_weights(call_read_only("weigh", self.weigh, micro_batch, called_by=self.called_by), samples)

    def run(self, micro_batch: Any) -> tuple[tuple[Term, ...], Any]:
        """Call the user's step and read its losses; raise InvalidArgument if they have no gradient."""
        return read_output(self.call_step(micro_batch))

    def call_step(self, micro_batch: Any) -> Any:
        """Return what the user's step returns; raise InvalidArgument if it does the training loop's work."""
        with self.watch():
            return self.step(self.model, micro_batch)

    def watch(self) -> AbstractContextManager[None]:
        """Raise InvalidArgument if a call in this block does the training loop's work."""
        return refuse_loop_calls(self._owners, self.parameters())

    @cached_property
    def _owners(self) -> list[Owner]:
        return find_owners(self.step, self.optimizer, self.parameters())

    def check_leaves(self, loss: torch.Tensor, stand_ins: Iterable[torch.Tensor] = ()) -> None:
        """Check the leaves of a loss; ``stand_ins`` are tensors that count as parameters, such as gathered ones."""
        check_leaves(loss, [*self.parameters(), *stand_ins])


def read_output(returned: Any) -> tuple[tuple[Term, ...], Any]:
    """Read the losses of a step and the values beside them; raise InvalidArgument if they have no gradient."""
    loss, aux = split_output(returned)
    terms = read_terms(loss)
    refuse_totals(loss)
    return terms, aux


def split_output(returned: Any) -> tuple[Any, Any]:
    """Return the losses of a step, and the values beside them, detached; raise InvalidArgument for a second loss."""
    loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if isinstance(aux, torch.Tensor) and aux.ndim == 0 and aux.requires_grad:
        read_terms(loss)  # raises its own error first
        raise InvalidArgument(
            "the step returned a second loss, of which no gradient would be taken: return both by name, as "
            '{"left": loss, "right": other}, or (loss, other.detach())'
        )
    return loss, aux if aux is None else map_tensors(aux, torch.Tensor.detach)


def check_leaves(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    """Raise InvalidArgument for a loss that trains a parameter beside these, since a retry could not undo that.

    A leaf that is a plain tensor passes: the step has usually made it, for a penalty on a gradient.
    """
    known = {id(parameter) for parameter in parameters}
    for leaf in leaves_of_graph(loss):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise InvalidArgument(
                f"the step trains a parameter of shape {tuple(leaf.shape)} that is in neither the model nor the "
                f"optimizer, so a retry could not take its gradient back: put it into one of them, or freeze it "
                f"with requires_grad_(False)"
            )


def warn_of_no_optimizer(workload: Workload) -> tuple[str, ...]:
    copies = "AdamW holds two more copies of the parameters"
    missing = f"no optimizer= was given: its state and its step are not counted; {copies}"
    return (missing,) if workload.optimizer is None else ()


def leaves_of_graph(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors in which a backward pass from here adds up gradients, once each."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":  # torch/csrc/autograd/functions/accumulate_grad.h
            yield node.variable  # type: ignore[attr-defined]
        waiting += [following for following, _ in node.next_functions]


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model={_show(model)} is not a torch.nn.Module")


def check_weigh(weigh: Any | None) -> None:
    if weigh is not None and not is_function_of(weigh, 1):
        raise InvalidArgument(f"weigh={_show(weigh)} cannot be called with a batch; pass weigh(micro_batch) -> number")


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    owners: dict[int, int] = {}
    for index, member in enumerate(members_of(optimizer)):
        _check_one_optimizer(member)
        for parameter in [one for group in member.param_groups for one in group["params"]]:
            if owners.setdefault(id(parameter), index) != index:
                raise InvalidArgument(
                    f"optimizer[{owners[id(parameter)]}] and optimizer[{index}] both hold a parameter of shape "
                    f"{tuple(parameter.shape)}, which would be moved twice a step: give each parameter to one of them"
                )
    if owners and not any(id(parameter) in owners for parameter in model.parameters()):
        raise InvalidArgument(
            f"{name_optimizer(optimizer)} holds none of the parameters of {type(model).__name__}: nothing would be "
            f"trained; make the optimizer from model.parameters(), after the model was moved or converted"
        )


def _check_one_optimizer(optimizer: Any) -> None:
    groups: Any = getattr(optimizer, "param_groups", None)
    listed = groups if isinstance(groups, list | tuple) else (None,)
    are_groups = all(isinstance(one, Mapping) and "params" in one for one in listed)
    if not (are_groups and is_instance_with(optimizer, "step")):
        raise InvalidArgument(
            f"optimizer={_show(optimizer)} is not an optimizer: pass one like those of torch.optim, or a list of them"
        )
    if isinstance(optimizer, torch.optim.LBFGS) or not takes_none(optimizer, "step"):
        raise InvalidArgument(
            f"{type(optimizer).__name__} calls a closure several times a step: choose another optimizer, or leave it "
            f"out (optimizer=None) and call runner.accumulate(batch) in your closure, after zero_grad(): its loss and "
            f".grad are the whole batch's"
        )


def _show(value: Any) -> str:
    return show_value(value) if isinstance(value, str | int | float | None) else name_type(value)
