"""Inferred examples: what models show of their input, and the error where they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from autobatch.batch.example import infer_example
from autobatch.errors import NeedsBatch
from autobatch.step.default_step import call_model


class Net(nn.Module):
    """Layers in a row, with attributes beside them."""

    def __init__(self, *layers: nn.Module, **attributes: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


CONV = nn.Conv2d(3, 4, 3)


class TestExampleInput:
    """Lightning's example_input_array."""

    @pytest.mark.parametrize(
        ("given", "shapes"),
        [
            (torch.ones(8, 5), [(1, 5)]),
            (torch.ones(1, 5), [(1, 5)]),
            ((torch.ones(8, 5), torch.ones(8, dtype=torch.long)), [(1, 5), (1,)]),
            ({"x": torch.ones(8, 5), "flag": True}, [(1, 5)]),
        ],
    )
    def test_first_sample(self, given: Any, shapes: list[tuple[int, ...]]) -> None:
        """Its first sample is taken, in its own form."""
        example = infer_example(Net(nn.Linear(5, 1), example_input_array=given))
        assert type(example) is type(given)
        tensors = (
            [example] if isinstance(example, torch.Tensor) else list(getattr(example, "values", lambda: example)())
        )
        assert [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor)] == shapes

    def test_it_goes_first(self) -> None:
        """It is preferred to what the layers show."""
        assert infer_example(Net(CONV, example_input_array=torch.ones(2, 3, 9, 9))).shape == (1, 3, 9, 9)

    def test_one_that_is_no_batch(self) -> None:
        """One whose tensors disagree is refused by name."""
        with pytest.raises(
            NeedsBatch, match=r"Net, and its example_input_array is not a batch .*batch\[0\] has 2, batch\[1\] has 3"
        ):
            infer_example(Net(CONV, example_input_array=(torch.ones(2), torch.ones(3))))


class TestImageConfig:
    """timm's pretrained_cfg."""

    @pytest.mark.parametrize(
        "attributes",
        [
            {"pretrained_cfg": {"input_size": (3, 32, 24)}},
            {"pretrained_cfg": SimpleNamespace(input_size=(3, 32, 24))},
            {"default_cfg": {"input_size": (3, 32, 24)}},
            {"pretrained_cfg": {}, "default_cfg": {"input_size": [3, 32, 24]}},
        ],
    )
    def test_input_size(self, attributes: dict[str, Any]) -> None:
        """It is one image of the size in the config, whether a dict or an object."""
        assert infer_example(Net(CONV, **attributes)).shape == (1, 3, 32, 24)

    @pytest.mark.parametrize(
        ("channels", "inferred"),
        [(1, 1), (4, 4), (3, 3), (48, 3)],
    )
    def test_channels(self, channels: int, inferred: int) -> None:
        """A model built for other channels gets those; 48 of them are the pixels of 4 x 4 images, moved by the stem."""
        model = Net(nn.Conv2d(channels, 2, 3), pretrained_cfg={"input_size": (3, 32, 24)})
        assert infer_example(model).shape == (1, inferred, 32, 24)

    def test_built_size(self) -> None:
        """A model built for another size than it was pretrained with gets the size it was built for."""
        patches = nn.Conv2d(3, 4, 8)
        patches.img_size = (64, 64)
        assert infer_example(Net(patch_embed=patches, pretrained_cfg={"input_size": (3, 32, 32)})).shape == (
            1,
            3,
            64,
            64,
        )


class TestFirstLayer:
    """A first layer that fixes the whole shape."""

    def test_linear(self) -> None:
        """A Linear that only vectors follow takes one vector, and the model runs on it."""
        model = perceptron()
        example = infer_example(model)
        assert example.shape == (1, 5)
        assert model(example).shape == (1, 3)

    def test_parametrized_linear(self) -> None:
        """Weight normalisation does not hide the first layer behind the second."""
        assert infer_example(nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))).shape == (1, 5)

    @pytest.mark.parametrize(
        "attributes",
        [
            {"config": SimpleNamespace(n_positions=7)},
            {"config": {"block_size": 7}},
            {"config": SimpleNamespace(max_position_embeddings=7, block_size=3)},
            {"max_seq_len": 7},
        ],
    )
    def test_embedding(self, attributes: dict[str, Any]) -> None:
        """An Embedding with a known length takes that many numbers, all in the vocabulary."""
        example = infer_example(Net(nn.Embedding(5, 2), nn.Linear(2, 2), **attributes))
        assert example.dtype == torch.int64
        assert example.tolist() == [[0, 1, 2, 3, 4, 0, 1]]

    @pytest.mark.parametrize("kind", ["GPT2", "Roberta", "Bert"])
    def test_transformers(self, kind: str) -> None:
        """A model of transformers gets as many tokens as its positions allow, never its dummy inputs, and runs."""
        transformers = pytest.importorskip("transformers")
        names = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = getattr(transformers, f"{kind}Config")(**names, max_position_embeddings=34, intermediate_size=8)
        model = getattr(transformers, f"{kind}Model")(config)
        example = infer_example(model)
        assert example.shape == (1, 32 if kind == "Roberta" else 34)
        assert call_model(model, example).last_hidden_state.shape == (*example.shape, 8)


OPEN = {
    "conv1d": (nn.Conv1d(2, 4, 3), "0 (Conv1d)"),
    "conv2d": (CONV, "0 (Conv2d)"),
    "embedding": (nn.Embedding(9, 2), "0 (Embedding)"),
    "lstm": (nn.LSTM(6, 2, batch_first=True), "0 (LSTM)"),
    "attention": (nn.MultiheadAttention(6, 2, batch_first=True), "0 (MultiheadAttention)"),
}


@pytest.mark.parametrize(("layer", "name"), OPEN.values(), ids=OPEN)
def test_open_shapes(layer: nn.Module, name: str) -> None:
    """One line names the layer, and says what to pass."""
    with pytest.raises(NeedsBatch) as caught:
        infer_example(nn.Sequential(layer))
    assert str(caught.value).startswith(f"no batch= was passed with Sequential, and its first layer, {name}")


class TwoArguments(Net):
    def forward(self, x: Any, mask: Any) -> Any:
        return x


class Encoder(Net):
    config = SimpleNamespace(is_encoder_decoder=True, n_positions=9)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net(), "Net, and it has no layer with parameters"),
        (Net(nn.LayerNorm(4)), r"0 \(LayerNorm\), does not show the input's shape: pass batch="),
        (nn.Conv2d(3, 4, 3), r"first layer, Conv2d, does not show .* batch=torch\.zeros\(1, 3, height, width\)"),
        (Net(nn.Linear(5, 4), nn.LSTM(4, 2)), r"\(Linear\), does not show"),
        (Net(nn.Linear(5, 4), nn.TransformerEncoderLayer(4, 2)), r"\(Linear\), does not show"),
        (nn.LazyLinear(4), "does not show the input's shape"),
        (TwoArguments(nn.Linear(5, 4)), r'needs x and mask: pass batch=\{"x": x, "mask": mask\}'),
        (Encoder(nn.Embedding(9, 2)), "an encoder and a decoder"),
        (Net(nn.Embedding(9, 2), config={"max_position_embeddings": 131072}), "allows 131072 tokens"),
        (Net(nn.Embedding(9, 2), max_seq_len=None), "does not show"),
    ],
)
def test_refusals(model: nn.Module, message: str) -> None:
    """Whatever does not fix the whole input is not guessed."""
    with pytest.raises(NeedsBatch, match=message) as caught:
        infer_example(model)
    assert "batch=" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_are_the_models(dtype: torch.dtype) -> None:
    """Floats come in the model's dtype and on its device, whole numbers keep theirs."""
    model = perceptron().to(dtype=dtype, device="meta")
    assert (infer_example(model).dtype, infer_example(model).device.type) == (dtype, "meta")
    tokens = Net(nn.Embedding(5, 2), max_seq_len=3).to(dtype)
    assert infer_example(tokens).dtype == torch.int64


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")  # such models are still around
def test_traced_models_show_nothing() -> None:
    """A traced model shows neither its layers' kinds nor its signature, and says what to pass."""
    with pytest.raises(NeedsBatch, match="pass batch="):
        infer_example(torch.jit.trace(perceptron(), torch.zeros(1, 5)))


def test_wrapped_models_are_looked_into() -> None:
    """A compiled model shows what the model inside shows."""
    assert infer_example(torch.compile(perceptron(), backend="eager")).shape == (1, 5)
