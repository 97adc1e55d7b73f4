"""Train a small Llama in a LightningModule, with ``shoestring.patch`` and a shoestring optimizer.

pip install lightning
python examples/python/lightning_module.py --device auto --steps 50
"""

from __future__ import annotations

import lightning
import torch
from common import VOCAB, parser, sequences
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import shoestring


class LanguageModel(lightning.LightningModule):
    """A Llama of two layers with random weights. ``losses`` holds the loss of every tenth step."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = LlamaForCausalLM(config)
        shoestring.patch(self.model)  # a loss without logits in memory, fused attention, norms and MLPs
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        if index % 10 == 0:  # reading a loss waits for the device
            self.losses.append(loss.item())
            print(f"step {index}: loss {self.losses[-1]:.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return shoestring.optim.AdamW(self.parameters(), lr=3e-3)  # 8-bit state


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the model, and return the printed losses."""
    options = parser("Trains a small Llama in a LightningModule.", steps=50).parse_args(arguments)
    torch.manual_seed(0)
    module = LanguageModel()
    trainer = lightning.Trainer(
        accelerator=options.device.type,
        devices=1 if options.device.type == "cpu" else [options.device.index],
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(sequences(rows=16 * options.steps, length=32), batch_size=16))
    return module.losses


if __name__ == "__main__":
    main()
