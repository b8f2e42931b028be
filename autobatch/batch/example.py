"""Finds the example batch that every trial is made from: given, drawn from a dataset, or inferred from the model.

- Of a Dataset or DataLoader the largest samples are collated together: the batch that a plan must survive. The size of
  a sample is its number of tensor elements alone after the loader's ``collate_fn``, then of characters. If lengths are
  known, they come first, and shorter samples are taken too. No worker process starts.
- From a model come Lightning's ``example_input_array``, timm's ``pretrained_cfg`` and a first layer that fixes the
  whole shape. Hugging Face's ``dummy_inputs`` are not used: a few tokens would give an absurd plan.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, default_collate

from autobatch._wrappers import unwrap_model
from autobatch.batch.lengths import ByLength
from autobatch.batch.registry import ListReading, find_type
from autobatch.batch.samples import Layout, describe
from autobatch.batch.tree import count_elements, leaves_of, map_tensors
from autobatch.errors import InvalidArgument, NeedsBatch

_MOST_SAMPLES = 64  # of a dataset: enough for a mixture, few enough that all are large
_CLASSES_PER_HALF = 4  # of lengths: a sample that fills a shorter edge is then at most a fifth shorter than it
_MOST_SHORTER = 24  # one of each class down to 1/64 of the longest: shorter edges are not tried

# If two batches of one loader are read differently, the later of these holds.
_OUTWEIGHS: tuple[ListReading, ...] = ("unclear", "samples", "fields")

# Names of the most tokens that a model takes: Hugging Face, GPT-2, nanoGPT, and the usual ones in papers' code.
_LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "block_size", "context_length",
    "max_seq_len", "max_seq_length", "max_sequence_length", "seq_len", "seq_length",
)  # fmt: skip
_LONGEST = 8192  # a greater length is what positions allow (Llama: 131072), not what anybody trains with

_MIXES_MORE_THAN_FEATURES = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.RNNBase, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag,
)  # fmt: skip


class Example(NamedTuple):
    """The samples of the trials, and warnings about their origin."""

    layout: Layout
    warnings: tuple[str, ...] = ()
    # With the smallest sample of a dataset before them: it may have nothing to count, as an image without a box.
    with_smallest: Layout | None = None


def find_example(
    model: nn.Module, batch: Any | None, most: int, lengths: ByLength | None = None, *, has_own_step: bool = False
) -> Example:
    """Return a given batch, about ``most`` samples of a Dataset or DataLoader, or a batch inferred from the model."""
    if batch is None and has_own_step:
        raise _needs_batch(unwrap_model(model), "what your step() takes cannot be read from it")
    if batch is None:
        why = "no batch= was given: sizes were tried with an input inferred from the model; real samples may be larger"
        return Example(describe(infer_example(model)), (why,))
    return choose_samples(batch, min(most, _MOST_SAMPLES), lengths) if is_source(batch) else Example(describe(batch))


def is_source(batch: Any) -> bool:
    """Return whether it is a ``Dataset`` or ``DataLoader`` to draw samples from, and no batch.

    Other classes count as datasets if they have ``__getitems__``, as Hugging Face's ``datasets.Dataset`` does. Their
    class is asked: a dict whose ``__getattr__`` answers every name is a batch.
    """
    if find_type(batch) is not None or isinstance(batch, type):
        return False
    return isinstance(batch, Dataset | DataLoader) or hasattr(type(batch), "__getitems__")


def count_dataset(batch: Any) -> int:
    dataset = getattr(batch, "dataset", None) if isinstance(batch, DataLoader) else batch
    if is_source(batch) and not isinstance(dataset, IterableDataset):
        with suppress(Exception):  # of the user's __len__
            return len(dataset)  # type: ignore[arg-type]
    return 0


def choose_samples(
    source: Any,
    count: int,
    lengths: ByLength | None = None,
    *,
    scan_limit: int = 2048,
    time_limit: float = 10.0,
) -> Example:
    """Return the ``count`` largest samples in one batch; with ``lengths`` half of them, and samples of shorter lengths.

    A map-style dataset is looked at evenly: ``scan_limit`` samples, and none after ``time_limit`` seconds. A stream
    gives one batch, since training may not get what was read. A loader of whole batches (``batch_size=None``) gives the
    one with most elements a sample. Each sample is fetched once: a random one differs the next time.
    """
    opened = _Source(source, lengths=lengths)
    if isinstance(source, DataLoader):
        gives_batches = source.batch_sampler is None
        opened = _Source(source.dataset, source.collate_fn, source.sampler, gives_batches, lengths)
    if isinstance(opened.dataset, IterableDataset) or not hasattr(opened.dataset, "__getitem__"):
        one_batch = 1 if opened.gives_batches else getattr(source, "batch_size", None) or count
        stream = iter(opened.dataset)
        try:
            largest, *_ = opened.rank(itertools.islice(stream, one_batch), count, time_limit)
        finally:
            getattr(stream, "close", lambda: None)()
        was_read = (
            f"one batch of {type(opened.dataset).__name__} was read, and training does not get it if this stream goes "
            f"on where it was left; pass a batch to read none"
        )
        return Example(opened.describe(largest), (was_read,))
    keys = opened.keys()
    chosen = (opened.dataset[keys[index]] for index in _spread(len(keys), scan_limit))
    largest, smallest, seen = opened.rank(chosen, count, time_limit)
    kind = "batches" if opened.gives_batches else "samples"
    looked_at = f"the largest was looked for among {seen} of the dataset's {len(keys)} {kind}"
    warnings = (looked_at,) if seen < len(keys) else ()
    if smallest:
        with suppress(Exception):  # of a collate function that does not pad: the largest may be of one size
            layout, most = opened.describe([*largest, *smallest]), len(largest)
            # The smallest comes first, where the few samples that are compared have it in any case.
            return Example(layout.part(range(most)), warnings, layout.part([most, *range(most)]))
    return Example(opened.describe(largest), warnings)


@dataclass(frozen=True)
class _Source:
    """A dataset, and the way in which a loader reads it."""

    dataset: Any
    collate: Callable[[Any], Any] = default_collate
    sampler: Any = None
    gives_batches: bool = False
    lengths: ByLength | None = None

    def keys(self) -> Sequence[Any]:
        if isinstance(self.sampler, SubsetRandomSampler):
            return self.sampler.indices
        if self.gives_batches and isinstance(self.sampler, BatchSampler):
            return list(self.sampler)
        if isinstance(self.dataset, Mapping):
            return list(self.dataset)
        try:
            return range(len(self.dataset))
        except (TypeError, NotImplementedError) as error:
            name = type(self.dataset).__name__
            raise InvalidArgument(f"{name} has no length, so no samples can be chosen from it: pass a batch") from error

    def rank(self, entries: Iterable[Any], count: int, time_limit: float) -> tuple[list[Any], list[Any], int]:
        """Return the largest entries, largest first; the smallest, if it is smaller; and how many were looked at."""
        deadline, seen = time.monotonic() + time_limit, 0
        extremes = dict[int, tuple[Any, Any]]()  # the longest of each class; without lengths the smallest of all

        def in_time() -> Iterator[tuple[Any, Any]]:
            nonlocal seen
            for entry in entries:
                seen += 1
                size = self._measure(entry)
                key, choose = (0, min) if self.lengths is None else (_class_of(size[0]), max)
                extremes[key] = choose(extremes.get(key, (size, entry)), (size, entry), key=itemgetter(0))
                yield size, entry
                if time.monotonic() > deadline:
                    return

        largest = heapq.nlargest(1 if self.gives_batches else count, in_time(), key=itemgetter(0))
        smallest: list[Any] = []
        if not largest:
            raise InvalidArgument(
                f"{type(self.dataset).__name__} gave no samples: pass a dataset that does, or a batch"
            )
        if not self.gives_batches and self.lengths is None:
            smallest = [entry for size, entry in extremes.values() if size < largest[0][0]]
        elif not self.gives_batches:
            largest = largest[: -(-count // 2)]
            shorter = [found for key, found in extremes.items() if key < _class_of(largest[-1][0][0])]
            largest += sorted(shorter, key=itemgetter(0))[: -_MOST_SHORTER - 1 : -1]
        return [entry for _, entry in largest], smallest, seen

    def describe(self, entries: Sequence[Any]) -> Layout:
        if self.gives_batches:
            return describe(self.collate(entries[0]))
        # Made of one sample and of several: a list whose length does not follow their number holds fields.
        one, batch = self.collate([entries[0]]), self.collate([*entries])
        several = batch if len(entries) > 1 else self.collate([entries[0], entries[0]])
        found = [_read_known(one, 1), _read_known(several, max(2, len(entries)))]
        if None in found:
            return describe(batch)
        read = [reading for lists in found if lists for reading in lists.items()]
        return describe(batch, dict(sorted(read, key=lambda reading: _OUTWEIGHS.index(reading[1]))))

    def _measure(self, entry: Any) -> tuple[int, float, int]:
        batch = self.collate(entry if self.gives_batches else [entry])
        samples = describe(batch).count if self.gives_batches else 1
        length = 0 if self.lengths is None else max(self.lengths.read(batch, samples))
        characters = sum(len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, str))
        return length, count_elements(batch) / samples, characters


def _class_of(length: int) -> int:
    return round(_CLASSES_PER_HALF * math.log2(length)) if length else -1


def _read_known(batch: Any, samples: int) -> Mapping[str, ListReading] | None:
    try:
        layout = describe(batch, samples=samples)
    except InvalidArgument:
        return None
    return layout.lists if layout.count == samples else None


def _spread(length: int, most: int) -> Iterator[int]:
    """Yield at most ``most`` indices, the two ends first, any first part of them spread evenly (van der Corput)."""
    bits = max(1, (length - 1).bit_length())
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    inside = (index for index in reversed_bits if 0 < index < length - 1)
    return itertools.islice(itertools.chain([0, length - 1][:length], inside), most)


def infer_example(model: nn.Module) -> Any:
    """Return a batch of one sample on the model's device, its floats in the model's dtype.

    It is the first sample of ``example_input_array``. Or it is zeros: ``(1, *input_size)`` for a model of timm,
    ``(1, in_features)`` for a first ``Linear``. Or it is token numbers, ``(1, length)``, for a first ``Embedding``.
    """
    inner = unwrap_model(model)
    example = getattr(inner, "example_input_array", None)
    example = _image_of(inner) if example is None else example
    example = _input_of_first_layer(inner) if example is None else example
    try:
        one = describe(example).grown(1).batch
    except InvalidArgument as error:
        raise _needs_batch(inner, f"its example_input_array is not a batch ({error})") from error
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
    layers = ((name, layer) for name, layer in model.named_modules() if _takes_input(layer))
    name, layer = next(layers, ("", None))
    if layer is None:
        raise _needs_batch(model, "it has no layer with parameters that shows its input")
    parameters: Iterable[inspect.Parameter] = ()
    with suppress(TypeError, ValueError):  # a scripted forward shows no signature
        parameters = inspect.signature(model.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
    if len(required) > 1:
        fields = ", ".join(f'"{name}": {name}' for name in required)
        raise _needs_batch(model, f"its forward() needs {' and '.join(required)}", f"{{{fields}}}")
    if isinstance(layer, nn.Embedding):
        return _tokens(model, name, layer)
    vectors_only = not any(isinstance(module, _MIXES_MORE_THAN_FEATURES) for module in model.modules())
    if isinstance(layer, nn.Linear) and layer.in_features > 0 and vectors_only:
        return torch.zeros(1, layer.in_features)
    raise _stays_open(model, name, layer)


def _needs_batch(model: nn.Module, why: str, example: str = "next(iter(loader)), or the loader itself") -> NeedsBatch:
    return NeedsBatch(f"no batch= was passed with {type(model).__name__}, and {why}: pass batch={example}")


def _takes_input(layer: nn.Module) -> bool:
    has_own = next(layer.children(), None) is None and next(layer.parameters(recurse=False), None) is not None
    # Parametrizations make children of a layer's parameters.
    return has_own or isinstance(layer, (nn.Linear, *_MIXES_MORE_THAN_FEATURES))


def _tokens(model: nn.Module, name: str, layer: nn.Embedding) -> torch.Tensor:
    config = getattr(model, "config", None)
    if _lookup(config, "is_encoder_decoder"):
        both = '{"input_ids": tokens, "labels": labels}'
        raise _needs_batch(model, "it is an encoder and a decoder, which need the input of both", both)
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
        own_length = "torch.zeros(1, 2048, dtype=torch.long), with the length you use"
        raise _needs_batch(model, f"it allows {length} tokens, more than most train with", own_length)
    return (torch.arange(length) % layer.num_embeddings).unsqueeze(0)


def _stays_open(model: nn.Module, name: str, layer: nn.Module) -> NeedsBatch:
    kind = type(layer).__name__
    why = f"its first layer, {f'{name} ({kind})' if name else kind}, does not show the input's shape"
    if isinstance(layer, nn.Embedding):
        return _needs_batch(model, why, "torch.zeros(1, length, dtype=torch.long), with the length you use")
    if isinstance(layer, nn.Conv2d):
        return _needs_batch(model, why, f"torch.zeros(1, {layer.in_channels}, height, width), with the size you use")
    return _needs_batch(model, why)


def _lookup(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
