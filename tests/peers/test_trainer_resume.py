"""A run of Transformers' Trainer that is cut and resumed ends with the same bits as one that was not.

The cases are the optimizers by the formats of their state. Trainer accumulates and clips, and writes and reads
the checkpoints itself.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn

import shoestring

transformers = pytest.importorskip("transformers")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {},
    "Lion": {},
    "LAMB": {},
    "AdEMAMix": {},
    "Adafactor": {"beta1": 0.9},
    "CAME": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
}
CASES = [
    (name, state, rounding)
    for name in OPTIMIZERS
    for state in ("8bit", "4bit", "bf16", "fp32")
    for rounding in ("nearest", "stochastic", "remainder")
]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random token sequences that depend on their index alone."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def optimizer_of(name: str, model: nn.Module, state: str, rounding: str) -> torch.optim.Optimizer:
    """Return an optimizer; Muon gets the matrices of the layers, and the rest keeps its initial values."""
    params = [p for n, p in model.named_parameters() if name != "Muon" or (p.dim() == 2 and "layers" in n)]
    kind = getattr(shoestring.optim, name)
    optimizer: torch.optim.Optimizer = kind(
        params, lr=1e-3, state_format=state, weight_rounding=rounding, **OPTIMIZERS[name]
    )
    return optimizer


def trained(
    case: tuple[str, str, str], folder: Path, steps: int, resume: str | None
) -> tuple[nn.Module, Any]:
    name, state, rounding = case
    model = tiny("llama").to(torch.bfloat16)
    optimizer = optimizer_of(name, model, state, rounding)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=3, per_device_train_batch_size=2, seed=5, report_to=[],
        gradient_accumulation_steps=2, max_grad_norm=0.5, use_cpu=True, disable_tqdm=True, logging_strategy="no",
        lr_scheduler_type="constant_with_warmup", warmup_steps=2,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])
def test_resumed_run_has_the_same_bits(case: tuple[str, str, str], tmp_path: Path) -> None:
    whole, state = trained(case, tmp_path / "whole", 6, None)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    resumed, other = trained(case, tmp_path / "resumed", 6, str(checkpoint))
    begun = tiny("llama").to(torch.bfloat16)
    changed = False
    for p, q, before in zip(whole.parameters(), resumed.parameters(), begun.parameters(), strict=True):
        assert torch.equal(p, q)
        changed = changed or not torch.equal(p, before)
    assert changed
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        mine, theirs = state.state.get(p, {}), other.state.get(q, {})
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key
