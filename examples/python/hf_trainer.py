"""Train a small Llama with the Trainer of transformers, ``shoestring.patch`` and a shoestring optimizer.

    python examples/python/hf_trainer.py --device auto --steps 50
    python examples/python/hf_trainer.py --lora

A random model takes the place of a pretrained one, so the script needs no files.
"""

from __future__ import annotations

import tempfile

import torch
from common import VOCAB, parser, sequences
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import shoestring


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the model, and return the logged losses."""
    parse = parser("Trains a small Llama with the Trainer of transformers.", steps=50)
    parse.add_argument("--lora", action="store_true", help="train LoRA adapters of frozen weights")
    options = parse.parse_args(arguments)
    if options.device.index:
        parse.error(
            "argument --device: expected auto, cpu or the first device, which Trainer takes, got "
            f"{options.device}. Set CUDA_VISIBLE_DEVICES={options.device.index}."
        )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if options.lora:
        shoestring.lora.apply(model, rank=8, alpha=16)
    shoestring.patch(model)  # a loss without logits in memory, fused attention, norms and MLPs

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = shoestring.optim.AdamW(trained, lr=3e-3)  # 8-bit state
    schedule = get_linear_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    data = [{"input_ids": row, "labels": row} for row in sequences(rows=16 * options.steps, length=32)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            logging_steps=min(10, options.steps),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=options.device.type == "cpu",
        )
        trainer = Trainer(model, settings, train_dataset=data, optimizers=(optimizer, schedule))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
