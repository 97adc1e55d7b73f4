"""Optimizers among what people combine them with: schedulers, hooks, averaging, torch.compile, Trainer, Lightning."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer, lr_scheduler, swa_utils

from shoestring.optim import SGD, AdamW, Lion, ScheduleFreeAdamW

Scheduler = lr_scheduler.LRScheduler

SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def model() -> Module:
    generator = torch.Generator().manual_seed(7)
    found = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5))
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=generator)
    return found


def batch(step: int) -> Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(step))


def loss_of(net: Module, step: int) -> Tensor:
    return net(batch(step)).square().mean()


def assert_equal(a: Module, b: Module, **tolerance: float) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **(tolerance or dict(rtol=0, atol=0)))


# ---- schedulers ------------------------------------------------------------------------------------------------------


def test_every_scheduler_of_torch_is_here() -> None:
    found = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    if torch.__version__.startswith("2.11."):  # newer ones may have more
        assert found <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "tensor"])
def test_scheduler(name: str, kind: str) -> None:
    if kind == "SGD":
        options, (ours, theirs) = dict(lr=1e-2, momentum=0.9), (SGD, torch.optim.SGD)
    else:
        options, (ours, theirs) = dict(lr=1e-2), (AdamW, torch.optim.AdamW)
    nets = model(), model()
    lrs = [options["lr"] if kind != "tensor" else torch.tensor(1e-2) for _ in nets]
    a = ours(nets[0].parameters(), **options | dict(lr=lrs[0]), state="fp32")
    b = theirs(nets[1].parameters(), **options | dict(lr=lrs[1]))
    schedules = [SCHEDULERS[name](o) for o in (a, b)]
    for step in range(6):
        for net, opt in zip(nets, (a, b), strict=True):
            opt.zero_grad()
            loss_of(net, step).backward()
            opt.step()
        for schedule in schedules if step < 5 else []:
            schedule.step(*[1.0] if name == "ReduceLROnPlateau" else [])
        for key in ("lr", "betas", "momentum"):
            if key in b.param_groups[0]:
                mine, other = (torch.as_tensor(o.param_groups[0][key]) for o in (a, b))
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
    assert float(a.param_groups[0]["lr"]) != 1e-2  # it did something
    assert_equal(*nets, rtol=1e-5, atol=1e-6)
    schedules[0].load_state_dict(copy.deepcopy(schedules[0].state_dict()))


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_step_hooks_see_and_change_arguments() -> None:
    net = model()
    opt = AdamW(net.parameters())
    calls: list[str] = []

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        assert optimizer is opt
        calls.append("before")
        return args, {"closure": lambda: calls.append("closure")}

    handles = [opt.register_step_pre_hook(before), opt.register_step_post_hook(lambda *_: calls.append("after"))]
    loss_of(net, 0).backward()
    opt.step()
    assert calls == ["before", "closure", "after"]
    for handle in handles:
        handle.remove()
    opt.step()
    assert len(calls) == 3
    with torch.profiler.profile() as profile:
        opt.step()
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_state_dict_hooks() -> None:
    net = model()
    opt = AdamW(net.parameters())
    loss_of(net, 0).backward()
    opt.step()
    order: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: order.append("pre"))

    def named(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        order.append("post")
        return state | {"note": "kept"}

    def unnamed(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        order.append("load pre")
        assert state.pop("note") == "kept"
        return state

    opt.register_state_dict_post_hook(named)
    opt.register_load_state_dict_pre_hook(unnamed)
    opt.register_load_state_dict_post_hook(lambda o: order.append("load post"))
    state = opt.state_dict()
    assert state["note"] == "kept" and state["format_version"] == 1
    opt.load_state_dict(state)
    assert order == ["pre", "post", "load pre", "load post"]


def test_named_parameters_and_their_names() -> None:
    nets = model(), model()
    opts = [AdamW(net.named_parameters()) for net in nets]
    loss_of(nets[0], 0).backward()
    opts[0].step()
    state = opts[0].state_dict()
    assert state["param_groups"][0]["param_names"] == [name for name, _ in nets[0].named_parameters()]
    opts[1].load_state_dict(state)
    assert opts[1].param_groups[0]["param_names"] == state["param_groups"][0]["param_names"]


# ---- averages of weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_averaged_model(average: str) -> None:
    nets = model(), model()
    opts = AdamW(nets[0].parameters(), lr=1e-2, state="fp32"), torch.optim.AdamW(nets[1].parameters(), lr=1e-2)
    averages = []
    for net, opt in zip(nets, opts, strict=True):
        rule = dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)) if average == "ema" else {}
        mean = swa_utils.AveragedModel(net, **rule)
        schedule = swa_utils.SWALR(opt, swa_lr=1e-3, anneal_epochs=2)
        for step in range(4):
            opt.zero_grad()
            loss_of(net, step).backward()
            opt.step()
            mean.update_parameters(net)
            schedule.step()
        averages.append(mean)
    assert_equal(averages[0].module, averages[1].module, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(p, q) for p, q in zip(averages[0].module.parameters(), nets[0].parameters(), strict=True))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


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
    with pytest.raises(torch._dynamo.exc.Unsupported, match="LowMemoryOptimizer.step"):
        torch.compile(lambda: opt.step(), fullgraph=True, backend="eager")()


def test_parameters_that_are_replaced_before_the_first_step() -> None:
    """As accelerate does when it shards a model that already has an optimizer."""
    nets = model(), model()
    opt = AdamW([torch.nn.Parameter(p.detach().clone()) for p in nets[0].parameters()], step_in_backward=True)
    opt.param_groups[0]["params"] = list(nets[0].parameters())
    other = AdamW(nets[1].parameters())
    for step in range(3):
        for net, each in zip(nets, (opt, other), strict=True):
            loss_of(net, step).backward()
            if each is opt:  # from the second step on within backward
                assert all((p.grad is None) == (step > 0) for p in net.parameters())
            each.step()
            each.zero_grad()
    assert_equal(*nets)


# ---- trainers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bf16"), [(AdamW, False), (AdamW, True), (ScheduleFreeAdamW, False)])
def test_hugging_face_trainer(kind: type[AdamW | ScheduleFreeAdamW], bf16: bool, tmp_path: Path) -> None:
    """optimizers=(optimizer, scheduler): accumulation, clipping, checkpoints that resume bit for bit, as without ours.

    Trainer calls eval() and train() of an optimizer that has them.
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
    assert opt.param_groups[0].get("train_mode", False) is False  # the last thing was an evaluation


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning(precision: str, tmp_path: Path) -> None:
    """configure_optimizers: accumulation, clipping, a scheduler for every step; a checkpoint brings the state back."""
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
            # With mixed precision, Lightning does not clip for optimizers that can unscale: they do it themselves.
            opt = AdamW(self.parameters(), weights="remainder", max_grad_norm=0.5 if is_mixed else None)
            schedule = lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=10)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_start(self) -> None:
            self.seen = [v.clone() for entry in self.optimizers().state.values() for v in entry.values()]

    def trainer(steps: int) -> Any:  # lightning.Trainer
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


# ---- GradScaler, closures --------------------------------------------------------------------------------------------


def test_grad_scaler_after_unscale_and_with_a_tensor_of_lr() -> None:
    nets = model(), model()
    opts = Lion(nets[0].parameters(), lr=torch.tensor(1e-3)), Lion(nets[1].parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            scaler.scale(loss_of(net, step)).backward()
            if opt is opts[0]:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
            scaler.step(opt)
        scaler.update()
    assert_equal(*nets, rtol=1e-6, atol=1e-7)
