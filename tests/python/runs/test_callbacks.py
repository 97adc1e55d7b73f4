"""Tests of callbacks: their order and state, and their adapters to other libraries' loops."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoestring
from file_limit import file_limit
from shoestring.callbacks import (
    Callback,
    Callbacks,
    OnStep,
    Run,
    TensorBoard,
    WandB,
    lightning_callback,
    transformers_callback,
)
from shoestring.optim import AdamW, Averages, schedules


class Recorder(Callback):
    def __init__(self, stop_at: int = 10**9) -> None:
        self.calls: list[Any] = []
        self.stop_at = stop_at
        self.count = 0

    def on_start(self, run: Run) -> None:
        self.calls.append(("start", run.step))

    def on_step(self, run: Run) -> None:
        self.count += 1
        self.calls.append(("step", run.step))
        run.should_stop = run.step >= self.stop_at

    def on_metrics(self, run: Run) -> None:
        self.calls.append(("metrics", run.step, sorted(run.metrics)))

    def on_end(self, run: Run) -> None:
        self.calls.append(("end", run.step))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(8, 2)


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Callbacks, run: Run, steps: int
) -> None:
    callbacks.on_start(run)
    for _ in range(steps):
        optimizer.zero_grad()
        run.loss = model(torch.full((4, 8), 0.1 * run.step)).square().mean()
        run.loss.backward()
        optimizer.step()
        run.step += 1
        callbacks.on_step(run)
        if run.should_stop:
            break
    callbacks.on_end(run)


def make() -> tuple[nn.Module, torch.optim.Optimizer, Averages, Recorder, Callbacks]:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = schedules.Scheduler(optimizer, lr=schedules.cosine(20))
    averages = Averages(model, decay=0.5, format="bf16")
    recorder = Recorder()
    callbacks = Callbacks(
        schedule=OnStep(scheduler.step), averages=OnStep(averages.update, every=2), record=recorder
    )
    return model, optimizer, averages, recorder, callbacks


def test_state_is_saved_with_the_run(tmp_path: Path) -> None:
    """A resumed loop is that without interruption, bit for bit, with averages in bf16."""
    model, optimizer, averages, recorder, callbacks = make()
    loop(model, optimizer, callbacks, Run(model, [optimizer]), 9)
    first = make()
    run = Run(first[0], [first[1]])
    loop(first[0], first[1], first[4], run, 5)
    shoestring.save_training(tmp_path / "run", first[0], first[1], step=run.step, callbacks=first[4])
    second = make()
    position = shoestring.load_training(tmp_path / "run", second[0], second[1], callbacks=second[4])
    loop(second[0], second[1], second[4], Run(second[0], [second[1]], position.step), 4)
    assert all(torch.equal(p, q) for p, q in zip(second[0].parameters(), model.parameters(), strict=True))
    assert second[3].count == recorder.count == 9
    assert second[2].updates == averages.updates == 4
    with second[2].swap(), averages.swap():
        assert all(torch.equal(p, q) for p, q in zip(second[0].parameters(), model.parameters(), strict=True))
    assert second[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert second[3].calls[0] == ("start", 5)


def test_a_callback_stops_the_loop() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    recorder = Recorder(stop_at=3)
    loop(model, optimizer, Callbacks(record=recorder), Run(), 10)
    assert recorder.calls == [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("end", 3)]


def test_errors() -> None:
    with pytest.raises(ValueError, match="OnStep: every: expected a number of at least 1, received 0"):
        OnStep(lambda: None, every=0)
    with pytest.raises(
        TypeError, match=r"Callbacks: log: expected a Callback, received builtin_function_or_method"
    ):
        Callbacks(log=print)  # type: ignore[arg-type]
    recorder = Recorder()
    with pytest.raises(
        ValueError, match="Callbacks: other: expected one of record, received a state for another"
    ):
        Callbacks(record=recorder).load_state_dict({"record.count": 3, "other.count": 4})
    assert recorder.count == 0


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "labels": torch.zeros(2)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def trainer(folder: Path, callbacks: Callback, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="steps",
        save_steps=4,
        logging_steps=3,
        num_train_epochs=2,
        disable_tqdm=True,
        **options,
    )
    return Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[transformers_callback(callbacks)])


def test_a_state_without_room_on_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    arguments: Any = types.SimpleNamespace(output_dir=tmp_path)
    state: Any = types.SimpleNamespace(global_step=3, is_world_process_zero=True)
    with file_limit(300), pytest.raises(OSError, match=f"File too large: '{folder}/shoestring_callbacks.pt'"):
        transformers_callback().on_save(arguments, state, None)
    assert os.listdir(folder) == []


def test_transformers_trainer(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer(tmp_path / "whole", Callbacks(record=recorder)).train()
    assert recorder.calls[0] == ("start", 0)
    assert [call[1] for call in recorder.calls if call[0] == "step"] == list(range(1, 13))
    assert recorder.calls[-1] == ("end", 12)
    metrics = [call for call in recorder.calls if call[0] == "metrics"]
    assert metrics[0][1] == 3 and "loss" in metrics[0][2]

    stopped = Recorder(stop_at=4)
    trainer(tmp_path / "part", Callbacks(record=stopped)).train()
    assert stopped.count == 4
    resumed = Recorder()
    trainer(tmp_path / "part", Callbacks(record=resumed)).train(resume_from_checkpoint=True)
    assert resumed.calls[0] == ("start", 4)
    assert resumed.count == 12


def test_transformers_trainer_resumes_from_another_folder(tmp_path: Path) -> None:
    """The Trainer does not tell callbacks the path that train() was given."""
    for name, step in (("one", 4), ("other", 8)):
        trainer(tmp_path / name, Callbacks(record=Recorder(stop_at=step))).train()
    given = tmp_path / "one" / "checkpoint-4"
    with pytest.raises(
        FileNotFoundError, match=r"new/checkpoint-4/shoestring_callbacks\.pt: expected the state of"
    ):
        trainer(tmp_path / "new", Callbacks(record=Recorder())).train(resume_from_checkpoint=str(given))
    trainer(tmp_path / "new", Callbacks()).train(resume_from_checkpoint=str(given))  # there is no state

    # the same step of another run, which has logged other losses
    logs = json.loads((tmp_path / "other" / "checkpoint-4" / "trainer_state.json").read_text())
    logs["log_history"][0]["loss"] += 1
    (tmp_path / "other" / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(logs))
    with pytest.raises(
        ValueError, match="other/checkpoint-4: expected the checkpoint from which the Trainer resumes"
    ):
        trainer(tmp_path / "other", Callbacks(record=Recorder())).train(resume_from_checkpoint=str(given))
    for wrong in ("checkpoint-8", "checkpoint-4"):
        made = trainer(tmp_path / "new", Callbacks(record=Recorder()))
        made.args.resume_from_checkpoint = str(tmp_path / "other" / wrong)
        with pytest.raises(ValueError, match="with another step or other logs"):
            made.train(resume_from_checkpoint=str(given))

    resumed = Recorder()
    made = trainer(tmp_path / "new", Callbacks(record=resumed))
    made.args.resume_from_checkpoint = str(given)
    made.train(resume_from_checkpoint=str(given))
    assert resumed.calls[0] == ("start", 4) and resumed.count == 12


def test_transformers_trainer_takes_one_callback(tmp_path: Path) -> None:
    made = trainer(tmp_path / "two", Callbacks(record=Recorder()))
    second = transformers_callback(Callbacks(other=Recorder()))
    made.add_callback(second)
    with pytest.raises(ValueError, match="expected one transformers_callback for a Trainer, received two"):
        made.train()
    made.pop_callback(second)
    made.train()
    made.train()


def test_lightning_trainer(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=1e-2)

    def run(callback: Callback, epochs: int, resume: str | None = None) -> Any:
        made = lightning.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            max_epochs=epochs,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[lightning_callback(callback)],
        )
        loader: Any = DataLoader(Rows(), batch_size=4)
        made.fit(Module(), loader, DataLoader(Rows(), batch_size=24), ckpt_path=resume)
        return made

    recorder = Recorder()
    made = run(Callbacks(record=recorder), 1)
    assert [call[1] for call in recorder.calls if call[0] == "step"] == list(range(1, 7))
    assert ("metrics", 6, ["val_loss"]) in recorder.calls
    assert recorder.calls[-1] == ("end", 6)
    made.save_checkpoint(tmp_path / "one.ckpt")
    resumed = Recorder()
    run(Callbacks(record=resumed), 2, str(tmp_path / "one.ckpt"))
    assert resumed.calls[0] == ("start", 6)
    assert resumed.count == 12


class Writer:
    """Stands in for the loggers of other packages."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.lines: list[Any] = []
        Writer.last = self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.lines.append((name, round(value, 6), step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.extend((name, round(value, 6), step) for name, value in values.items())

    def close(self) -> None:
        self.lines.append("closed")

    finish = close
    last: Writer


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_loggers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are read a step late, when the device has computed them."""
    module: Any = types.ModuleType(kind)
    if kind == "tensorboard":
        module.SummaryWriter = Writer
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        logger: Callback = TensorBoard("folder", every=2)
    else:
        module.init = Writer
        monkeypatch.setitem(sys.modules, "wandb", module)
        logger = WandB(every=2, project="one")
    run = Run()
    logger.on_start(run)
    for step in range(1, 5):
        run.step, run.loss = step, torch.tensor(step / 10)
        logger.on_step(run)
        run.loss.fill_(99.0)  # the program may reuse its tensor
    assert Writer.last.lines == [("loss", 0.2, 2)]
    run.metrics = {"val": 0.5}
    logger.on_metrics(run)
    logger.on_end(run)
    assert Writer.last.lines == [("loss", 0.2, 2), ("val", 0.5, 4), ("loss", 0.4, 4), "closed"]


@pytest.mark.parametrize(
    ("make", "module"), [(lambda: TensorBoard("x"), "torch.utils.tensorboard"), (lambda: WandB(), "wandb")]
)
def test_a_missing_package_is_named(make: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="expected the package, received none: pip install"):
        make()
