"""Guards what is the user's around one call of the function: modules, NumPy arrays, and the error that it raises.

Covers eval mode, after which each layer has its own mode again; writes into arrays that a piece may be views of, which
are undone; and attributes of an error. Does not cover tensors, which count their writes (``piece``), nor writes
through ``tensor.numpy()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.batch.tree import is_array

__all__ = ["WatchedArrays", "eval_mode", "set_attributes"]


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


class WatchedArrays:
    """Copies of arrays, which count no writes, while a function runs on views of them.

    Read-only views would be cheaper, but ``torch.from_numpy`` warns of them, and much compiled code takes none.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        """Copy those that are arrays and can be written into."""
        self._pairs = [(leaf, leaf.copy()) for leaf in leaves if is_array(leaf) and leaf.flags.writeable]

    def put_back(self) -> bool:
        """Undo what was written; returns whether something was."""
        # Bits, not values: nan equals itself, and of objects it is asked whether they are the same.
        written = [(array, copy) for array, copy in self._pairs if array.tobytes() != copy.tobytes()]
        for array, copy in written:
            array[...] = copy
        return bool(written)


def set_attributes(error: Exception, **values: Any) -> None:
    """Set what its class allows."""
    for name, value in values.items():
        try:
            setattr(error, name, value)
        except AttributeError:  # a class whose attributes cannot be set
            return
