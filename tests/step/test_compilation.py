"""Whether a step is compiled, and that its ladder of sizes stays within what torch compiles."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from workloads import Plain, make_batch, mean_step

from autobatch.planning.division import balance, compiled_ladder
from autobatch.step.model_info import is_compiled


def compiled_in_place(**options) -> nn.Module:
    model = Plain()
    model.compile(backend="eager", **options)
    return model


def with_compiled_forward() -> nn.Module:
    """A module whose forward was replaced by a compiled one."""
    model = Plain()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


class Decorated(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, inputs):
        return inputs


class Callable:
    @torch.compile(backend="eager")
    def __call__(self, model, batch):
        return mean_step(model, batch)

    @torch.compile(backend="eager")
    def run(self, model, batch):
        return mean_step(model, batch)


def compiled_step():
    return torch.compile(mean_step, backend="eager")


@functools.wraps(compiled_step())
def logged_step(model, batch):
    return compiled_step()(model, batch)


COMPILED = {
    "module": lambda: (torch.compile(Plain(), backend="eager"), mean_step),
    "submodule": lambda: (nn.Sequential(torch.compile(Plain(), backend="eager")), None),
    "lazy module": lambda: (torch.compile(nn.LazyLinear(4), backend="eager"), mean_step),
    "in place": lambda: (compiled_in_place(), mean_step),
    "submodule in place": lambda: (nn.ModuleList([compiled_in_place()]), mean_step),
    "forward": lambda: (with_compiled_forward(), mean_step),
    "decorated forward": lambda: (Decorated(), mean_step),
    "step": lambda: (Plain(), compiled_step()),
    "partial step": lambda: (Plain(), functools.partial(functools.partial(compiled_step()), batch=None)),
    "wrapped step": lambda: (Plain(), logged_step),
    "callable object": lambda: (Plain(), Callable()),
    "method": lambda: (Plain(), Callable().run),
    "module as step": lambda: (Plain(), torch.compile(Plain(), backend="eager")),
}

EAGER = {
    "plain": lambda: (Plain(), mean_step),
    "default step": lambda: (Plain(), None),
    "partial step": lambda: (Plain(), functools.partial(mean_step)),
    "disabled step": lambda: (Plain(), torch.compiler.disable(mean_step)),
    "disabled module": lambda: (torch.compiler.disable(Plain()), mean_step),
    "compiled, then disabled": lambda: (Plain(), torch.compiler.disable(compiled_step())),
    "disabled in place": lambda: (compiled_in_place(disable=True), mean_step),
}


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_what_is_compiled_is_seen(make):
    """Each way in which torch.compile can get into a step is found before it is run."""
    assert is_compiled(*make())


@pytest.mark.parametrize("make", EAGER.values(), ids=EAGER)
def test_what_is_not_compiled_is_left_alone(make):
    """A plain step has all sizes to choose from, also one for which compilation is disabled."""
    assert not is_compiled(*make())


@pytest.mark.parametrize(("target", "size"), [(256, 86), (100, 37), (64, 64)])
def test_all_rungs_of_a_compiled_step_are_compiled(target, size):
    """With a graph for each size, all rungs and an evaluation stay under torch's limit of recompilations."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(Plain(), backend=count, dynamic=False)
    sizes = {piece for rung in compiled_ladder(size) for piece in balance(target, rung)}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for piece in sorted(sizes, reverse=True) * 2:
            mean_step(model, make_batch(piece, torch.float64)).backward()
        assert len(graphs) == len(sizes)
        with torch.no_grad():
            mean_step(model, make_batch(size, torch.float64))
    assert len(graphs) == len(sizes) + 1 < torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
