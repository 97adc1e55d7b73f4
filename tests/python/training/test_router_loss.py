"""Terms of a model's loss that are no sums over tokens count once in a step, however many tokens it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relative_error import relative_error
from shoestring.data.batches import IGNORE, Examples
from shoestring.training.config import FinetuneConfig
from shoestring.training.run.folder import Run
from shoestring.training.run.loop import Trainer
from shoestring.training.run.models import fused_loss, plain_loss

FIELDS = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2, "router_aux_loss_coef": 0.5, "output_router_logits": True}  # fmt: skip


def mixtral(**more: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **FIELDS, **more))


def examples() -> Examples:
    starts = np.cumsum([0, 9, 7, 12, 6, 8, 5])
    tokens = torch.randint(0, 64, (int(starts[-1]),)).numpy().astype(np.uint32)
    return Examples(tokens, torch.rand(len(tokens)).numpy() < 0.6, starts, np.arange(6), pad=0)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_has_the_mean_of_the_micro_batches(plain: bool, accumulate: int) -> None:
    """The reference is transformers' own loss, with the mean over the labels of the step and of its other terms."""
    model, data = mixtral(), examples()
    batches = [data.rows([2 * number, 2 * number + 1]) for number in range(accumulate)]
    total = sum(int((labels != IGNORE).sum()) for _, labels in batches)
    expected = torch.zeros(())
    for inputs, labels in batches:
        own = model(inputs, labels=labels, shift_labels=labels, num_items_in_batch=total)
        router = model.router_aux_loss_coef * own.aux_loss
        expected = expected + own.loss - router + router / accumulate
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = plain_loss(model) if plain else fused_loss(model, 8)
    config = FinetuneConfig(model="", accumulate=accumulate, batch_size=2, steps=1, precision="fp32")
    trainer = Trainer(Run(config, "finetune", Path()), model, loss, data, data, NoProgress())
    found: list[float] = []
    readings: Any = type("Readings", (), {"add_loss": lambda _, value: found.append(value.item())})()
    step: Any = type("Step", (), {"batches": [(*batch, {}) for batch in batches], "labelled": total})()
    trainer._accumulate(0, step, readings, first=False)
    assert sum(found) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert relative_error(parameter.grad, gradient) < 1e-4


class NoProgress:
    def step(self, metrics: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


def test_validation_has_the_loss_of_training() -> None:
    model, data = mixtral(), examples()
    config = FinetuneConfig(model="", batch_size=2, steps=1, precision="fp32")
    trainer = Trainer(Run(config, "finetune", Path()), model, fused_loss(model, 8), data, data, NoProgress())
    total, count = 0.0, 0
    for number in range(3):
        inputs, labels = data.rows([2 * number, 2 * number + 1])
        tokens = int((labels != IGNORE).sum())
        with torch.no_grad():
            own = model.eval()(inputs, labels=labels, shift_labels=labels, num_items_in_batch=tokens)
        total, count = total + own.loss.item() * tokens, count + tokens
    assert trainer.evaluate() == pytest.approx(total / count, rel=1e-5)
