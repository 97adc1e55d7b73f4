"""save_training and load_training: bitwise continuation, in both languages, and files that do not fit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoestring
from build_folder import program
from shoestring import optim
from shoestring.files.safetensors_file import open_safetensors
from shoestring.optim import schedules

FACTS = {"data": "abc"}


class Run:
    """A small model with dropout and batch norm, and everything that steps it."""

    def __init__(self, kind: str = "AdamW", features: int = 16, reverse: bool = False) -> None:
        for seeds in (torch.manual_seed, random.seed, np.random.seed):
            seeds(1)
        # The first layer has no bias: its gradient would be zero up to rounding, which Adam amplifies.
        self.model = nn.Sequential(
            nn.Linear(8, features, bias=False),
            nn.BatchNorm1d(features),
            nn.Dropout(0.3),
            nn.Linear(features, 2),
        )
        params = list(self.model.parameters())[:: -1 if reverse else 1]
        make: dict[str, Any] = {
            "AdamW": lambda: optim.AdamW(params, lr=1e-2, betas=(0.8, 0.97)),
            "4bit": lambda: optim.Lion(params, lr=1e-2, state_format="4bit"),
            "two groups": lambda: optim.AdamW(
                [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}], lr=1e-2
            ),
            "GaLore": lambda: optim.GaLore([{"params": params, "rank": 4}], optim.AdamW, lr=1e-2),
            "SAM": lambda: optim.SAM(params, optim.AdamW, lr=1e-2),
            "torch.AdamW": lambda: torch.optim.AdamW(params, lr=1e-2),
            "torch.SGD": lambda: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
            "torch.Adafactor": lambda: torch.optim.Adafactor(params, lr=1e-2),
            "torch.NAdam": lambda: torch.optim.NAdam(params, lr=1e-2),
        }
        self.optimizer: torch.optim.Optimizer = make[kind]()
        self.schedule = schedules.Scheduler(self.optimizer, lr=schedules.cosine(20, warmup=3))
        self.plateau = schedules.ReduceOnPlateau(self.optimizer, patience=1)
        self.taken = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(32, 8) + random.random() + float(np.random.rand())

            def closure(x: Tensor = x) -> Tensor:
                self.optimizer.zero_grad()
                loss: Tensor = self.model(x).square().mean()
                loss.backward()
                return loss

            loss = closure() if not isinstance(self.optimizer, optim.SAM) else None
            losses.append(float((self.optimizer.step(closure) if loss is None else loss).detach()))
            if loss is not None:
                self.optimizer.step()
            self.schedule.step()
            self.plateau.step(1.0)
            self.taken += 1
        return losses

    def parts(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "plateau": self.plateau}

    def save(self, path: Path) -> None:
        position = {"row": self.taken}
        shoestring.save_training(
            path, self.model, self.optimizer, step=self.taken, position=position, facts=FACTS, **self.parts()
        )

    def load(self, path: Path) -> shoestring.TrainingPosition:
        return shoestring.load_training(path, self.model, self.optimizer, facts=FACTS, **self.parts())

    def tensors(self) -> list[Tensor]:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [self.optimizer.state.get(p, {}) for p in params]
        entries = [entry[name] for entry in states for name in sorted(entry)]
        state = [entry for entry in entries if isinstance(entry, Tensor)]
        return [t.clone() for t in [*self.model.state_dict().values(), *state, torch.get_rng_state()]]

    def everything(self) -> tuple[Any, ...]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return (str(groups), self.schedule.state_dict(), self.plateau.state_dict(), random.getstate())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        "AdamW",
        "4bit",
        "two groups",
        "GaLore",
        "SAM",
        "torch.AdamW",
        "torch.SGD",
        "torch.Adafactor",
        "torch.NAdam",
    ],
)
def test_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = Run(kind)
    straight.train(4)
    straight.save(tmp_path / "run")
    expected = straight.train(5)
    resumed = Run(kind)
    resumed.train(1)  # other weights, state and random numbers than those of the file
    torch.manual_seed(77)
    assert resumed.load(tmp_path / "run") == shoestring.TrainingPosition(4, {"row": 4})
    assert resumed.train(5) == expected
    assert same(resumed.tensors(), straight.tensors())
    assert resumed.everything() == straight.everything()


def test_several_optimizers_frozen_weights_and_torch_parts(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer], Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        optimizers = [
            optim.Muon([model[1].weight], lr=0.1),
            optim.AdamW([model[1].bias, *model[2].parameters()]),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        return model, optimizers, torch.optim.lr_scheduler.StepLR(optimizers[1], 2), scaler

    def train(model: nn.Module, optimizers: list[Any], steps: Any, scaler: Any, count: int) -> Tensor:
        for _ in range(count):
            loss = model(torch.randn(4, 8)).square().mean()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            steps.step()
        return loss.detach()

    a, b = make(), make()
    train(*a, 3)
    path = tmp_path / "run"
    shoestring.save_training(path, a[0], a[1], steps=a[2], scaler=a[3])
    names = open_safetensors(path, "").tensors()
    assert not any(name.startswith("model.0.") for name in names)
    expected = train(*a, 3)
    shoestring.load_training(path, b[0], b[1], steps=b[2], scaler=b[3])
    assert torch.equal(train(*b, 3), expected)
    assert a[2].get_last_lr() == b[2].get_last_lr() and a[3].get_scale() == b[3].get_scale()
    shoestring.save_training(path, a[0], a[1], frozen=True)
    assert "model.0.weight" in open_safetensors(path, "").tensors()
    with pytest.raises(ValueError, match="received '0.bias' in the file alone"):
        shoestring.load_training(path, b[0], b[1])


@pytest.mark.parametrize(("kind", "exact"), [("AdamW", True), ("torch.AdamW", False), ("torch.SGD", False)])
def test_cpp_continues_python_and_back(kind: str, exact: bool, tmp_path: Path) -> None:
    """LibTorch's optimizers compute the same formulas in another order, so their results differ within rounding."""

    def without_numpy(run: Run, steps: int) -> None:
        for _ in range(steps):
            run.optimizer.zero_grad()
            run.model(torch.randn(32, 8)).square().mean().backward()
            run.optimizer.step()
            run.schedule.step()
            run.plateau.step(1.0)

    # The C++ program has the parameters in the order of the model. Three of them have equal shapes.
    straight = Run(kind, reverse=True)
    without_numpy(straight, 4)
    straight.taken = 4
    straight.save(tmp_path / "run")
    without_numpy(straight, 6)
    done = subprocess.run(
        [*program("training_file"), kind, tmp_path / "run", "3"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "7 7\n"
    resumed = Run(kind, reverse=True)
    assert resumed.load(tmp_path / "run") == shoestring.TrainingPosition(7, {"row": 7})
    without_numpy(resumed, 3)
    assert resumed.schedule.state_dict() == straight.schedule.state_dict()
    assert resumed.plateau.state_dict() == straight.plateau.state_dict()
    if exact:
        assert same(resumed.tensors(), straight.tensors())
    for ours, other in zip(resumed.tensors(), straight.tensors(), strict=True):
        # 6 steps of a well-conditioned model: each adds a few roundings of fp32.
        torch.testing.assert_close(ours.double(), other.double(), rtol=1e-5, atol=1e-6)


def check_refused(run: Run, path: Path, message: str, **changes: Any) -> None:
    """Loading raises, and nothing changes."""
    before, others = run.tensors(), run.everything()
    arguments: dict[str, Any] = {"facts": FACTS, **run.parts(), **changes}
    with pytest.raises(ValueError, match=message):
        shoestring.load_training(path, run.model, run.optimizer, **arguments)
    assert same(run.tensors(), before) and run.everything() == others


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved = Run()
    saved.train(2)
    saved.save(path)
    run = Run()
    run.train(1)
    check_refused(
        run, path, "expected data abd, received abc: the file belongs to another run", facts={"data": "abd"}
    )
    check_refused(run, path, "expected corpus x, received None", facts={"corpus": "x"})
    check_refused(
        run,
        path,
        r"expected the parts \['plateau', 'scaler', 'schedule'\]",
        scaler=torch.amp.GradScaler("cpu"),
    )
    other = Run(features=15)
    other.train(1)
    check_refused(
        other, path, r"0.weight: expected \(15, 8\) torch.float32, received \(16, 8\) torch.float32"
    )
    lion = Run("4bit")
    lion.train(1)
    check_refused(lion, path, "expected optimizer Lion, received AdamW")
    plain = Run("torch.AdamW")
    plain.train(1)
    check_refused(plain, path, "expected optimizer torch.AdamW, received '?AdamW")
    groups = Run("two groups")
    groups.train(1)
    check_refused(groups, path, "expected 2 groups of parameters, received 1")

    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"step": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state != {"step": 1}:
                raise ValueError("no")

    shoestring.save_training(
        path, saved.model, saved.optimizer, facts=FACTS, **saved.parts(), last=saved.plateau
    )
    check_refused(run, path, "no", last=Refuses())


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = Run()
    run.train(2)
    run.save(path)
    data = path.read_bytes()
    generator = random.Random(5)
    for _ in range(40):
        at = generator.randrange(len(data))
        damaged = bytearray(data)
        damaged[at] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        check_refused(run, path, "load_training: ")
    for size in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:size])
        check_refused(run, path, "load_training: ")
    optim.save_optimizer(run.optimizer, path)  # type: ignore[arg-type]
    check_refused(run, path, "expected a file of save_training, format_version 1 or 2, received another file")
    with pytest.raises(FileNotFoundError):
        run.load(tmp_path / "none")


VALUES: tuple[Any, ...] = (
    float("nan"),
    [float("-inf"), 1.5],
    2**70,
    [1, "a", None],
    {"a": {"b": [1.5]}},
    "text",
    True,
    [],
    (),
    [0.1, 0.2],
    (0.1, 0.2),
    [True, 1, 1.0],
    -0.0,
    {1: "a", "1": "b", (2, None): 2.5, True + 1: [()]},
    Counter([3, 3, 5]),
    OrderedDict(b=1, a=torch.Size([2, 3])),
    np.float64(1.5),
    [np.int32(3), np.float32(0.1)],
    torch.tensor(2.0),
    torch.tensor([True, False]),
    [torch.ones(2, 3, dtype=torch.bfloat16), None, {"x": torch.zeros(0)}],
    {"tensor": "part.value", "dict": 1},
)
REFUSED: tuple[Any, ...] = (
    object(),
    {1, 2},
    b"bytes",
    defaultdict(int),
    {torch.ones(1): 1},
    [torch.ones(2).to_sparse()],
    torch.ones(2, device="meta"),
    np.ones(2),
    range(3),
)


def described(value: Any) -> str:
    """Return a text with the types of a nested value, and its contents."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, dict):
        return f"{type(value)} {[(described(k), described(v)) for k, v in value.items()]}"
    if isinstance(value, (list, tuple)):
        return f"{type(value)} {[described(entry) for entry in value]}"
    return f"{type(value)} {value!r}"


def test_states_that_a_file_cannot_hold(tmp_path: Path) -> None:
    class Part:
        def __init__(self, value: object) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    run, path = Run(), tmp_path / "run"
    for value in VALUES:
        part, again = Part(value), Part(None)
        shoestring.save_training(path, run.model, part=part)
        shoestring.load_training(path, run.model, part=again)
        assert described(again.value) == described(value)
    before = path.read_bytes()
    for value in REFUSED:
        with pytest.raises(ValueError, match="save_training: part: expected a state that a file can hold"):
            shoestring.save_training(path, run.model, part=Part(value))
    assert path.read_bytes() == before
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="model: weight: expected a dense tensor, received one that is on the meta"
    ):
        shoestring.save_training(path, meta)


CHILD = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_training_file import Run
run = Run()
path = Path(sys.argv[1])
if path.exists():
    run.taken = run.load(path).step
while run.taken < 60:
    run.train(1)
    run.save(path)
    print(run.taken, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_time(tmp_path: Path) -> None:
    """A run that is killed again and again ends with the bits of a run that was never killed."""
    straight = Run()
    straight.train(60)
    source = CHILD.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    path, kills = tmp_path / "run", 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", source, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert child.stdout is not None
        if kills < 4:
            for _ in range(7):
                child.stdout.readline()
            time.sleep(0.003 * kills)
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            kills += 1
            continue
        output, _ = child.communicate()
        assert child.returncode == 0 and output.splitlines()[-1] == "60"
        break
    ended = Run()
    assert ended.load(path).step == 60
    assert same(ended.tensors(), straight.tensors())
