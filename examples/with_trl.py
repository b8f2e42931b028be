"""Supervised fine-tuning with TRL on the standard library's sources: ``python with_trl.py``."""

import logging
import sysconfig
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from autobatch.integrations.transformers import attach

logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("autobatch").setLevel(logging.INFO)

files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
texts = [part for file in files for part in file.read_text("utf-8").split("\n\n") if 20 < len(part) < 2000]
special = {"pad_token": "<pad>", "eos_token": "<eos>"}
tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
tokens.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=[*special.values()]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
torch.manual_seed(0)
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=256, pad_token_id=0, **size))

options = {"max_steps": 20, "learning_rate": 3e-3, "max_length": 256, "bf16": False, "dataloader_pin_memory": False}
logs = {"logging_steps": 5, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
arguments = SFTConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=32, **options, **logs)
data = Dataset.from_dict({"text": texts})
trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
step = attach(trainer, target_batch=32, budget=None if torch.cuda.is_available() else "192MiB")
trainer.train()
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, micro-batches {step.result.micro_batch_sizes}")
