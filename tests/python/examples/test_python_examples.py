"""Each script in examples/python trains, and reports a wrong device in one line."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples/python"
# The script, its arguments, and the largest last loss, relative to the first.
RUNS = {
    "train": ("train", [], 0.5),
    "torch_ops": ("torch_ops", ["--backend", "aot_eager"], 0.5),
    "hf_trainer": ("hf_trainer", [], 0.7),
    "hf_trainer --lora": ("hf_trainer", ["--lora"], 0.97),
    "lightning_module": ("lightning_module", [], 0.5),
}
SCRIPTS = ("train", "torch_ops", "hf_trainer", "lightning_module")


@pytest.fixture
def main_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[list[str]], list[float]]]:
    """Return a function that imports an example and returns its main function."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def import_main(name: str) -> Callable[[list[str]], list[float]]:
        if name in ("hf_trainer", "lightning_module"):
            pytest.importorskip("transformers")
        if name == "lightning_module":
            pytest.importorskip("lightning")
        return importlib.import_module(name).main

    return import_main


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch report two CUDA devices."""
    found = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


def errors_of(
    main: Callable[[list[str]], object], arguments: list[str], capsys: pytest.CaptureFixture
) -> str:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("run", RUNS)
def test_it_trains(run: str, main_of: Callable, capsys: pytest.CaptureFixture) -> None:
    name, arguments, most = RUNS[run]
    losses = main_of(name)(["--device", "cpu", "--steps", "30", *arguments])
    assert len(losses) >= 3 and all(map(math.isfinite, losses))
    assert losses[-1] < most * losses[0]
    printed = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", capsys.readouterr().out)]
    assert printed[: len(losses)] == pytest.approx(losses, abs=1e-3)


@pytest.mark.slow
def test_the_compiler_gives_the_losses_of_the_trace(main_of: Callable) -> None:
    main, steps = main_of("torch_ops"), ["--device", "cpu", "--steps", "20"]
    assert main(steps) == pytest.approx(main([*steps, "--backend", "aot_eager"]), rel=1e-3)


def test_two_lines_change_a_plain_script(main_of: Callable, tmp_path: Path) -> None:
    """The comments in train.py name the plain lines; with them, the losses are nearly the same."""
    changed = re.compile(r"( *)# Changed: .* Before: (.*)\n *(\w+) = .*\n")
    plain, count = changed.subn(r"\1\3 = \2\n", (FOLDER / "train.py").read_text())
    plain = plain.replace("import shoestring\n", "from torch.nn import functional as F\n")
    assert count == 2 and "import shoestring" not in plain
    script = tmp_path / "plain_train.py"
    script.write_text(plain)
    spec = importlib.util.spec_from_file_location("plain_train", script)
    module = importlib.util.module_from_spec(spec)
    main = main_of("train")
    spec.loader.exec_module(module)
    arguments = ["--device", "cpu", "--steps", "21"]
    assert main(arguments) == pytest.approx(module.main(arguments), rel=0.05)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "meta", "cpu:1", ""])
@pytest.mark.usefixtures("no_gpu")
def test_a_wrong_device(name: str, device: str, main_of: Callable, capsys: pytest.CaptureFixture) -> None:
    text = errors_of(main_of(name), ["--device", device], capsys)
    expected = f"argument --device: expected auto or a device of this machine (cpu), got {device}. Use --device auto."
    assert text.endswith(f": {expected}\n")


@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "many", ""])
def test_wrong_steps(steps: str, main_of: Callable, capsys: pytest.CaptureFixture) -> None:
    text = errors_of(main_of("train"), [f"--steps={steps}"], capsys)
    assert f"argument --steps: expected a whole number of at least 1, got {steps}. Use --steps 10." in text


@pytest.mark.usefixtures("two_gpus")
def test_devices_of_an_accelerator(main_of: Callable, capsys: pytest.CaptureFixture) -> None:
    main_of("train")
    parse = importlib.import_module("common").parser("", 1).parse_args
    for text, device in {"auto": "cuda:0", "cuda": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}.items():
        assert parse(["--device", text]).device == torch.device(device)
    text = errors_of(main_of("train"), ["--device", "cuda:2"], capsys)
    assert "expected auto or a device of this machine (cpu, cuda:0, cuda:1), got cuda:2" in text
    text = errors_of(main_of("hf_trainer"), ["--device", "cuda:1"], capsys)
    assert "got cuda:1. Set CUDA_VISIBLE_DEVICES=1." in text


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_without_an_accelerator(main_of: Callable) -> None:
    main_of("train")
    assert importlib.import_module("common").parser("", 1).parse_args([]).device == torch.device("cpu")
