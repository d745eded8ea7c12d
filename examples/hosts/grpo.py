"""TRL's GRPO on its transformers path: `generate` writes what is rewarded, and the weights change with every step."""

import tempfile

import torch
from both_ways import TARGET, compare
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from eagle31_hf.demo import CONVERSATIONS

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
begun = {name: weights.clone() for name, weights in target.state_dict().items()}
prompts = Dataset.from_list([{"prompt": messages} for messages in CONVERSATIONS])


def train() -> list[str]:
    target.load_state_dict(begun)
    written: list[str] = []

    def short(completions: list, **_) -> list[float]:
        written.extend(completion[0]["content"] for completion in completions)
        return [-float(len(completion[0]["content"])) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder, max_steps=6, per_device_train_batch_size=4, num_generations=4, max_completion_length=32,
            learning_rate=1e-4, seed=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        )  # fmt: skip
        GRPOTrainer(target, short, args=settings, train_dataset=prompts, processing_class=tokenizer).train()
    return written


compare(target, train)
