"""Tests of optimizers with torch.compile, accelerate, the Trainer of transformers, and Lightning."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer, lr_scheduler

from shoestring.optim import LAMB, AdamW, ScheduleFreeAdamW
from small_model import assert_equal, batch, loss_of, model

# ---- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["model", "step", "optimizer", "backward", "accumulate"])
def test_compiled_training_step(where: str) -> None:
    nets = model(), model()
    options = dict(max_grad_norm=0.1, step_in_backward=where == "backward")
    opts = AdamW(nets[0].parameters(), **options), AdamW(nets[1].parameters(), **options)

    def training_step(net: Module, opt: AdamW, step: int, forward: Callable[[Module, int], Tensor]) -> Tensor:
        opt.zero_grad()
        if where == "accumulate":
            with opt.accumulate():
                forward(net, step).backward()
        loss = forward(net, step + 1)
        loss.backward()
        opt.step()
        return loss.detach()

    compiled, forward = training_step, loss_of
    if where in ("model", "backward"):
        forward = torch.compile(loss_of, backend="aot_eager")
    elif where == "optimizer":
        opts[0].step = torch.compile(opts[0].step, backend="aot_eager")
    else:
        compiled = torch.compile(training_step, backend="aot_eager")
    for step in range(3):
        loss = compiled(nets[0], opts[0], step, forward)
        torch.testing.assert_close(loss, training_step(nets[1], opts[1], step, loss_of), rtol=1e-5, atol=1e-6)
    assert_equal(*nets, rtol=1e-4, atol=1e-5)
    assert all(entry["step"] == 3 for entry in opts[0].state.values())


def test_a_step_breaks_a_full_graph_in_words() -> None:
    net = model()
    opt = AdamW(net.parameters())
    loss_of(net, 0).backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Steps.step"):
        torch.compile(lambda: opt.step(), fullgraph=True, backend="eager")()


def test_parameters_that_are_replaced_before_the_first_step() -> None:
    """An optimizer whose parameters are replaced before the first step steps the new parameters.

    accelerate replaces parameters when it shards a model that already has an optimizer.
    """
    nets = model(), model()
    opt = AdamW([torch.nn.Parameter(p.detach().clone()) for p in nets[0].parameters()], step_in_backward=True)
    opt.param_groups[0]["params"] = list(nets[0].parameters())
    other = AdamW(nets[1].parameters())
    for step in range(3):
        for net, each in zip(nets, (opt, other), strict=True):
            loss_of(net, step).backward()
            # From the second step on, the parameters that replaced the optimizer's own are stepped within
            # backward.
            if each is opt:
                assert all((p.grad is None) == (step > 0) for p in net.parameters())
            each.step()
            each.zero_grad()
    assert_equal(*nets)


def test_ranges_in_place_of_whole_parameters_are_refused() -> None:
    """A parameter may take another shape before the first step. Another tensor of another shape is refused."""
    params = [torch.nn.Parameter(torch.ones(6, 10)) for _ in range(2)]
    opt = LAMB(params)
    params[0].data = torch.ones(6, 5)
    params[0].grad = torch.ones(6, 5)
    for ranges in ([torch.ones(30)], [params[0], torch.ones(30)], [torch.ones(6, 5), params[1]]):
        opt.param_groups[0]["params"] = ranges
        with pytest.raises(
            RuntimeError, match="LAMB: params: expected whole parameters, received .* in place of"
        ):
            opt.step()
    opt.param_groups[0]["params"] = params
    opt.step()
    assert params[0].max() < 1


# ---- trainers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bf16"), [(AdamW, False), (AdamW, True), (ScheduleFreeAdamW, False)])
@pytest.mark.sample(2)
def test_hugging_face_trainer(kind: type[AdamW | ScheduleFreeAdamW], bf16: bool, tmp_path: Path) -> None:
    """transformers' Trainer accumulates, clips and resumes with the same bits, using shoestring's optimizers.

    If the optimizer has methods eval() and train(), Trainer calls them.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trained(folder: str, resume: str | None) -> tuple[Module, Optimizer]:
        torch.manual_seed(0)
        sizes = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        opt = kind(net.parameters(), lr=1e-2)
        schedule = transformers.get_linear_schedule_with_warmup(opt, 1, 6)
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=6,
            save_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            bf16=bf16,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            net, arguments, train_dataset=data, eval_dataset=data[:8], optimizers=(opt, schedule)
        )
        trainer.train(resume_from_checkpoint=resume)
        return net, opt

    through, _ = trained("a", None)
    resumed, opt = trained("b", str(tmp_path / "a" / "checkpoint-3"))
    assert_equal(through, resumed)
    entry = opt.state[next(resumed.parameters())]
    assert entry["step"] == 6 and entry["exp_avg_sq"].dtype == torch.uint8
    # transformers' Trainer evaluates at the end, so a Schedule-Free optimizer ends in eval mode.
    assert opt.param_groups[0].get("train_mode", False) is False


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning(precision: str, tmp_path: Path) -> None:
    """Lightning accumulates, clips, schedules and resumes bit for bit with shoestring's optimizers."""
    lightning = pytest.importorskip("lightning")
    warnings.simplefilter("ignore")
    is_mixed = precision.endswith("mixed")

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.seen: list[Tensor] = []

        def training_step(self, rows: Tensor, _: int) -> Tensor:
            return self.net(rows.to(next(self.parameters()).dtype)).square().mean()

        def configure_optimizers(self) -> dict[str, Any]:
            # With mixed precision, Lightning does not clip for an optimizer that unscales gradients in its
            # step, so the optimizer clips by itself.
            opt = AdamW(
                self.parameters(), weight_rounding="remainder", max_grad_norm=0.5 if is_mixed else None
            )
            schedule = lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=10)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_start(self) -> None:
            self.seen = [v.clone() for entry in self.optimizers().state.values() for v in entry.values()]

    def trainer(steps: int) -> Any:  # returns a lightning.Trainer
        return lightning.Trainer(
            max_steps=steps,
            precision=precision,
            accumulate_grad_batches=2,
            gradient_clip_val=None if is_mixed else 0.5,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )

    rows = torch.utils.data.DataLoader(batch(0).repeat(8, 1), batch_size=8)
    first, second = Net(), Net()
    (one := trainer(3)).fit(first, rows)
    one.save_checkpoint(tmp_path / "saved.ckpt")
    (two := trainer(5)).fit(second, rows, ckpt_path=tmp_path / "saved.ckpt")
    saved = [v for entry in one.optimizers[0].state.values() for v in entry.values()]
    assert len(saved) == len(second.seen) > 0
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(saved, second.seen, strict=True))
    entry = next(iter(two.optimizers[0].state.values()))
    assert entry["step"] == 5 and entry["exp_avg"].dtype == torch.uint8
    assert ("weight_remainder" in entry) == (precision == "bf16-true")
