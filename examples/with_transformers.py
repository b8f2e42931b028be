"""Fine-tunes a model of GPT-2's shape on the standard library's sources: ``python with_transformers.py``."""

import logging
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from autobatch.integrations.transformers import attach

LENGTH = 128
logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("autobatch").setLevel(logging.INFO)

source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
texts = [torch.tensor([*source[start : start + LENGTH]]) for start in range(0, len(source) - LENGTH, LENGTH)]
dataset = [{"input_ids": text, "labels": text} for text in texts]
torch.manual_seed(0)
size = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))

arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=64,
    max_steps=20,
    learning_rate=3e-3,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=torch.cuda.is_available(),
)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
step = attach(trainer, target_batch=64, budget=None if torch.cuda.is_available() else "48MiB")
trainer.train()
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, micro-batches {step.result.micro_batch_sizes}")
