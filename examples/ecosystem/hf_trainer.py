"""Hugging Face's Trainer over netfold:  torchrun --nproc-per-node 2 examples/ecosystem/hf_trainer.py

The line that changes: `dist.init_process_group("netfold")` before `TrainingArguments(use_cpu=True)`.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "netfold"

# `TrainingArguments(ddp_backend="netfold")` is refused on a CPU, by Accelerate, which the Trainer uses.
dist.init_process_group(BACKEND)

set_seed(0)
tokens = [[(start + 3 * i) % 64 for i in range(16)] for start in range(64)]
data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=data).train()

assert dist.get_backend() == BACKEND
if dist.get_rank() == 0:
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).norm()
    print(f"backend {dist.get_backend()}: loss {result.training_loss:.9g}, norm of the weights {weights:.9g}")
dist.destroy_process_group()
