"""Finds the example batch that every trial is made from: given, drawn from a dataset, or inferred from the model.

From a model are read Lightning's ``example_input_array``, timm's ``pretrained_cfg`` and a first layer that fixes the
whole shape; not Hugging Face's ``dummy_inputs``, as a few tokens would give an absurd plan. If the shape stays open,
the error says what to pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from autobatch._wrappers import unwrap_model
from autobatch.batch.largest import choose_samples, is_source
from autobatch.batch.layout import Layout, describe
from autobatch.batch.lengths import ByLength
from autobatch.batch.registry import find_type
from autobatch.batch.tree import fields_of, map_tensors
from autobatch.errors import InvalidArgument, NeedsBatch

_MOST_SAMPLES = 64
"""How many of a dataset's largest samples are taken: enough for a mixture, few enough that all are large."""

_LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "block_size", "context_length",
    "max_seq_len", "max_seq_length", "max_sequence_length", "seq_len", "seq_length",
)  # fmt: skip
"""What models call the most tokens they take: Hugging Face, GPT-2, nanoGPT, and the usual names in papers' code."""

_LONGEST = 8192
"""Tokens beyond which a length is what positions allow (Llama: 131072), not what anybody trains with."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OVER_MORE_THAN_FEATURES = (*_CONVOLUTIONS, nn.RNNBase, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)

_FEATURES = {nn.Linear: "in_features", nn.RNNBase: "input_size", nn.MultiheadAttention: "embed_dim"}

_CONVOLVED = {
    1: ("length", (1000,)),
    2: ("height and width", (224, 224)),
    3: ("depth, height and width", (16, 112, 112)),
}
"""By the number of dimensions: what a convolution leaves open, and sizes of the usual order to start from."""


class Example(NamedTuple):
    """A batch, and warnings about its origin.

    Attributes:
        layout: The samples of the trials.
        warnings: Facts that the user should know.
        with_smallest: The same after the smallest sample of the dataset, which may have nothing to count; ``None``
            for a given batch, and for samples of one size.
    """

    layout: Layout
    warnings: tuple[str, ...] = ()
    with_smallest: Layout | None = None


def find_example(
    model: nn.Module, batch: Any | None, most: int, lengths: ByLength | None = None, *, has_own_step: bool = False
) -> Example:
    """An example: a given batch, about ``most`` samples of a Dataset or DataLoader, or one inferred from the model.

    Samples of a source are its largest; with ``lengths`` its longest, and some of all shorter lengths.

    Raises:
        NeedsBatch: No batch is given, and the model does not show its input or the user's own step takes it.
        InvalidArgument: The batch cannot be counted.
    """
    if batch is None and has_own_step:
        raise NeedsBatch(
            f"no batch= was given, and what your step() takes cannot be read from {_name(unwrap_model(model))}: pass "
            f"an example as batch=, such as next(iter(loader)) or the loader itself"
        )
    if batch is None:
        warning = (
            "no batch= was given: sizes were tried with an input inferred from the model; real samples may be larger"
        )
        return Example(describe(infer_example(model)), (warning,))
    if not is_source(batch):
        return Example(describe(batch))
    layout, note, has_smallest = choose_samples(batch, min(most, _MOST_SAMPLES), lengths)
    warnings = () if note is None else (note,)
    if not has_smallest:
        return Example(layout, warnings)
    # First, where the few samples that are compared have it in any case.
    count = layout.count - 1
    return Example(layout.part(range(count)), warnings, layout.part([count, *range(count)]))


def check_values(batch: Any) -> None:
    """Raise InvalidArgument where a tensor has no values, or the ``take`` of a registered type ignores its indices."""
    if isinstance(batch, torch.Tensor):
        refuse_meta(batch)
    elif (registered := find_type(batch)) is not None:
        for tensor in registered.tensors(batch):
            refuse_meta(tensor)
        registered.check_take(batch)
    for _, child in fields_of(batch) or ():
        check_values(child)


def refuse_meta(tensor: torch.Tensor) -> None:
    """Raise InvalidArgument where a tensor of a batch is on the meta device."""
    if tensor.is_meta:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} in the batch is on the meta device and has no values to run: "
            f"pass real samples (predict() needs no values)"
        )


def infer_example(model: nn.Module) -> Any:
    """A batch of one sample on the model's device, its floats in the model's dtype.

    The first sample of ``example_input_array``; or zeros of ``(1, *input_size)`` (timm) or ``(1, in_features)`` (a
    first layer ``Linear``); or token numbers of ``(1, length)`` (a first layer ``Embedding`` where the model or its
    config has a length).

    Raises:
        NeedsBatch: The model has none of them; the message names the layer and the size that stays open.
    """
    inner = unwrap_model(model)
    example = getattr(inner, "example_input_array", None)
    if example is None:
        image = _image_of(inner)
        example = _input_of_first_layer(inner) if image is None else image
    try:
        one = describe(example).grow(1)
    except InvalidArgument as error:
        raise NeedsBatch(f"{_name(inner)}.example_input_array is no batch ({error}): pass batch=") from error
    device = next((held.device for held in (*inner.parameters(), *inner.buffers())), torch.device("cpu"))
    dtypes = (parameter.dtype for parameter in inner.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, torch.get_default_dtype())

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        return moved.requires_grad_(tensor.requires_grad)

    return map_tensors(one, move)


def _image_of(model: nn.Module) -> torch.Tensor | None:
    """Return the image of a timm model: of the size that it was built with, else that of its pretraining."""
    size = _lookup(getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None), "input_size")
    if not isinstance(size, tuple | list) or len(size) != 3:
        return None
    channels, height, width = size
    convolution = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    # A multiple is not another number of channels but pixels moved into them, as TResNet's stem does.
    if convolution is not None and convolution.in_channels % channels != 0:
        channels = convolution.in_channels
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = built if isinstance(built, tuple) and len(built) == 2 else (height, width)
    return torch.zeros(1, channels, height, width)


def _input_of_first_layer(model: nn.Module) -> torch.Tensor:
    found = next(((name, layer) for name, layer in model.named_modules() if _takes_input(layer)), None)
    if found is None:
        raise NeedsBatch(f"{_name(model)} has no layer with parameters that shows its input: pass an example as batch=")
    name, layer = found
    required = _required_arguments(model)
    if len(required) > 1:
        raise NeedsBatch(f"{_name(model)}.forward needs {', '.join(required)}: pass an example of them as batch=")
    if isinstance(layer, nn.Embedding):
        return _tokens(model, name, layer)
    vectors_only = not any(isinstance(module, _OVER_MORE_THAN_FEATURES) for module in model.modules())
    if isinstance(layer, nn.Linear) and layer.in_features > 0 and vectors_only:
        return torch.zeros(1, layer.in_features)
    raise _stays_open(model, name, layer)


def _takes_input(layer: nn.Module) -> bool:
    """Whether it is a layer; one of torch's own is, even where parametrizations made children of its parameters."""
    if isinstance(layer, (nn.Linear, *_OVER_MORE_THAN_FEATURES)):
        return True
    return next(layer.children(), None) is None and next(layer.parameters(recurse=False), None) is not None


def _required_arguments(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a scripted forward shows no signature
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]


def _tokens(model: nn.Module, name: str, layer: nn.Embedding) -> torch.Tensor:
    """Token numbers of the greatest length, each in the vocabulary."""
    config = getattr(model, "config", None)
    if _lookup(config, "is_encoder_decoder"):
        raise NeedsBatch(f"{_name(model)} is an encoder and a decoder: pass the input of both as batch=")
    lengths = (_lookup(source, length) for source in (config, model) for length in _LENGTHS)
    length = next((value for value in lengths if isinstance(value, int) and value > 0), None)
    if length is None:
        raise _stays_open(model, name, layer)
    # RoBERTa counts from behind its padding index: of 514 positions 512 tokens may have one.
    embeddings = [other for other in model.modules() if isinstance(other, nn.Embedding) and other is not layer]
    positions = next((other for other in embeddings if other.num_embeddings == length), None)
    if positions is not None and positions.padding_idx is not None:
        length -= positions.padding_idx + 1
    if length > _LONGEST:
        raise NeedsBatch(
            f"{_name(model)} allows {length} tokens, more than most train with: pass the length you use as "
            f"batch=torch.zeros(1, 2048, dtype=torch.long)"
        )
    return (torch.arange(length) % layer.num_embeddings).unsqueeze(0)


def _stays_open(model: nn.Module, name: str, layer: nn.Module) -> NeedsBatch:
    """Make an error with the sizes that the layer fixes, those that it leaves open, and a batch to paste and adapt."""
    kind = type(layer).__name__
    features = next((getattr(layer, size) for of, size in _FEATURES.items() if isinstance(layer, of)), 0)
    if isinstance(layer, _CONVOLUTIONS):
        size, usual = _CONVOLVED[len(layer.kernel_size)]
        shape = ", ".join(map(str, (1, layer.in_channels, *usual)))
        open_ = f"takes {layer.in_channels} channels and leaves {size} open: pass yours as batch=torch.zeros({shape})"
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        open_ = "leaves the number of tokens open: pass yours as batch=torch.zeros(1, 512, dtype=torch.long)"
    elif features:
        open_ = (
            f"takes {features} features and leaves the number of steps open: pass yours as "
            f"batch=torch.zeros(1, 100, {features})"
        )
        if not getattr(layer, "batch_first", True):
            open_ += " (samples first: let step transpose, batch_first is False)"
    else:
        open_ = "does not show the input's shape: pass an example as batch="
    return NeedsBatch(f"{_name(model)}'s first layer, {f'{name} ({kind})' if name else kind}, {open_}")


def _lookup(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _name(model: nn.Module) -> str:
    return type(model).__name__
