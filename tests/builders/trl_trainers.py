"""Trainers of TRL and sentence-transformers with random weights on real text, and a tokenizer made here."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainers import arguments, lines


@cache
def tokenizer() -> Any:
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>"]
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>"
    )


def llama(kind: str = "LlamaForCausalLM", **options: Any) -> Any:
    """A model of two small layers, in float64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=257,
        **options,
    )
    model = getattr(transformers, kind)(config).double()
    model.name_or_path = model.config._name_or_path = "tiny"
    return model


def texts(count: int = 192) -> list[str]:
    return [*lines(count)]


def sft(folder: Path, model: Any = None, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    settings = {"max_length": 48, "bf16": False, "activation_checkpointing": False, **options}
    return SFTTrainer(
        model=model or llama(),
        args=arguments(folder, SFTConfig, **settings),
        train_dataset=datasets.Dataset.from_dict({"text": texts()}),
        processing_class=tokenizer(),
    )


def dpo(folder: Path, **options: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    settings = {"max_length": 48, "bf16": False, "activation_checkpointing": False, **options}
    lines_ = texts(384)
    data = {"prompt": ["def "] * 192, "chosen": lines_[:192], "rejected": lines_[192:]}
    return DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=arguments(folder, DPOConfig, **settings),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


def preferences(folder: Path, kind: str, **options: Any) -> Any:
    """Preferences without a reference model: CPO or ORPO."""
    settings = {"max_length": 48, "bf16": False, "activation_checkpointing": False, **options}
    module = importlib.import_module(f"trl.experimental.{kind.lower()}")
    lines_ = texts(384)
    data = {"prompt": ["def "] * 192, "chosen": lines_[:192], "rejected": lines_[192:]}
    return getattr(module, f"{kind}Trainer")(
        model=llama(),
        args=arguments(folder, getattr(module, f"{kind}Config"), **settings),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


def kto(folder: Path, **options: Any) -> Any:
    """Single texts, of which one in five is desirable."""
    from trl import KTOConfig, KTOTrainer

    settings = {
        "max_length": 48,
        "bf16": False,
        "activation_checkpointing": False,
        "loss_type": "apo_zero_unpaired",
        **options,
    }
    data = {"prompt": ["def "] * 192, "completion": texts(), "label": [number % 5 == 0 for number in range(192)]}
    return KTOTrainer(
        model=llama(),
        ref_model=llama(),
        args=arguments(folder, KTOConfig, **settings),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


def reward(folder: Path, **options: Any) -> Any:
    """A model that tells the better of two texts."""
    from trl import RewardConfig, RewardTrainer

    settings = {"max_length": 48, "bf16": False, "activation_checkpointing": False, **options}
    lines_ = texts(384)
    return RewardTrainer(
        model=llama("LlamaForSequenceClassification", num_labels=1),
        args=arguments(folder, RewardConfig, **settings),
        train_dataset=datasets.Dataset.from_dict({"chosen": lines_[:192], "rejected": lines_[192:]}),
        processing_class=tokenizer(),
    )


def generating(folder: Path, kind: str) -> Any:
    """Reinforcement learning by GRPO or RLOO: a step generates texts, and a longer one is better."""
    import trl

    saved = folder / "model"
    llama().save_pretrained(saved)
    tokenizer().save_pretrained(saved)
    settings = {"bf16": False, "activation_checkpointing": False, "num_generations": 4, "max_completion_length": 4}
    return getattr(trl, f"{kind}Trainer")(
        model=str(saved),
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
        args=arguments(folder, getattr(trl, f"{kind}Config"), **settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts()[:32]}),
        processing_class=tokenizer(),
    )


def embedder(folder: Path, loss: str, *, labels: bool = False, dropout: float = 0.0, **options: Any) -> Any:
    """Sentence embeddings with one of the library's losses."""
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses

    model = _encoder(folder, dropout)
    lines_ = texts(384)
    data: dict[str, Any] = {"one": lines_[:192], "other": lines_[192:]}
    if labels:
        data["label"] = [float(len(line) % 2) for line in lines_[:192]]
    return SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, Arguments, **options),
        train_dataset=datasets.Dataset.from_dict(data),
        loss=getattr(losses, loss)(model),
    )


def embedder_of_two(folder: Path, names: dict[str, str], first: str, **options: Any) -> Any:
    """Sentence embeddings of two datasets with a loss each; batches come from both in turn, from ``first`` first."""
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses

    model, lines_ = _encoder(folder), texts(384)
    pairs = {"one": lines_[:96], "other": lines_[96:192], "label": [float(len(line) % 2) for line in lines_[:96]]}
    triplets = {"a": lines_[:96], "b": lines_[96:192], "c": lines_[192:288]}
    data = {name: triplets if loss == "TripletLoss" else pairs for name, loss in names.items()}
    order = [first, *(name for name in data if name != first)]
    return SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, Arguments, multi_dataset_batch_sampler="round_robin", **options),
        train_dataset=datasets.DatasetDict({name: datasets.Dataset.from_dict(data[name]) for name in order}),
        loss={name: getattr(losses, names[name])(model) for name in order},
    )


def _encoder(folder: Path, dropout: float = 0.0) -> Any:
    """Embeds texts, in float64."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=258,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    saved = str(folder / "encoder")
    if not Path(saved).exists():  # once ranks train together, only the first one writes
        transformers.BertModel(config).save_pretrained(saved)
        tokenizer().save_pretrained(saved)
    return SentenceTransformer(modules=[Transformer(saved, max_seq_length=48), Pooling(16)], device="cpu").double()
