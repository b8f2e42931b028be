"""Puts modules into eval mode for a while, and each of their layers back into the mode it had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

__all__ = ["eval_mode"]


@contextmanager
def eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All layers of these modules are in eval mode inside the block, unless the block itself changes that."""
    modes = [(layer, layer.training) for module in modules for layer in module.modules()]
    trained = [(module, module.training) for module in modules if any(layer.training for layer in module.modules())]
    try:
        try:
            for module, _ in trained:
                module.eval()
            yield
        finally:
            _put_back(trained, modes)
    except BaseException:
        _put_back(trained, modes)  # interrupted: some layers would stay in eval mode
        raise


def _put_back(trained: Iterable[tuple[nn.Module, bool]], modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, mode in trained:
        module.train(mode)  # by the method, which a module may have of its own: LoRA layers unmerge there
    for layer, mode in modes:
        layer.training = mode
