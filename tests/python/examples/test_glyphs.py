"""The glyph examples render fonts, learn to read unseen ones, and lower the losses of a diffusion model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples/python/glyphs"
FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"  # these exist on every machine
OPTIONS = ["--quick", "--threads", "1", "--fonts", str(FONTS)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of the example. The number of threads is restored.

    The runs change no other setting of the process, or they would train with settings of each other.
    """
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield importlib.import_module
    torch.set_num_threads(threads)
    assert torch.get_float32_matmul_precision() == precision


def test_rendered_glyphs(module: Callable[[str], Any]) -> None:
    data = module("glyph_data")
    training, held_out = data.load(FONTS, per_family=1)
    for glyphs in (training, held_out):
        assert glyphs.images.shape == (62 * len(glyphs.families), 1, 64, 64)
        assert glyphs.images.dtype == torch.uint8 and glyphs.labels.bincount().unique().numel() == 1
    assert not set(training.families) & set(held_out.families)
    assert held_out.families == data.load.__wrapped__(FONTS, per_family=1)[1].families  # rendered again

    images = data.render(FONTS / "DejaVuSans.ttf")
    heights = (images > 127).any(2).sum(1)
    upper, lower = data.CHARACTERS.index("X"), data.CHARACTERS.index("x")
    assert heights[upper] > 1.2 * heights[lower]  # all characters have one size
    assert (images[:, 0] == 0).all() and (images[:, -1] == 0).all()  # nothing is cut off
    assert data.render(FONTS / "STIXNonUni.ttf") is None  # has no letters


def test_the_classifier_reads_an_unseen_family(module: Callable[[str], Any], tmp_path: Path) -> None:
    path, main = tmp_path / "glyphs.json", module("glyph_classifier").main
    results = main([*OPTIONS, "--json", str(path), "--runs", "lawa"])
    assert json.loads(path.read_text()) == {"classifier": results}
    curve = results["accuracy"]["lawa"]["0"]
    assert [len(point) for point in curve] == [2] * 4  # the weights and the averages
    assert max(curve[-1]) > 0.08  # chance is 1/62


def test_all_parts_take_steps_and_the_figure_shows_them(module: Callable[[str], Any], tmp_path: Path) -> None:
    path, classifier = tmp_path / "glyphs.json", module("glyph_classifier")
    runs = ["plain", "cutmix", "fast_defaults", "all"]
    options = [*OPTIONS, "--times", "--json", str(path), "--runs", *runs]
    times = classifier.main(options)["times"]["step_milliseconds"]
    assert list(times) == runs and min(times.values()) > 0
    curves = {name: {"0": [[0.1], [0.2], [0.3], [0.4]]} for name in times}
    module("glyph_data").add_to_json(path, "classifier", {"accuracy": curves})
    (figure,) = module("glyph_plot").main([str(path)])
    assert figure.name == "glyphs_classifier.svg" and "<svg" in figure.read_text()


def test_both_weightings_lower_the_loss(module: Callable[[str], Any], tmp_path: Path) -> None:
    path, diffusion = tmp_path / "glyphs.json", module("glyph_diffusion")
    results = diffusion.main([*OPTIONS, "--json", str(path)])
    assert json.loads(path.read_text()) == {"diffusion": results}
    seed = results["seeds"]["0"]
    for weighting in ("uniform", "min_snr"):
        for loss in ("uniform", "min_snr"):
            losses = seed[weighting][loss]
            assert losses[-1] < 0.9 * losses[0] < 1, (weighting, loss)
    assert seed["uniform"]["uniform"] != seed["min_snr"]["uniform"]
    assert module("glyph_plot").main([str(path)])[0].name == "glyphs_diffusion.svg"


def test_steps_to_reach_a_loss(module: Callable[[str], Any]) -> None:
    slow = {"steps": [10, 20, 30], "uniform": [3.0, 2.0, 1.0], "min_snr": [3.0, 2.0, 1.5]}
    fast = {"steps": [10, 20, 30], "uniform": [3.0, 1.5, 0.5], "min_snr": [1.0, 0.9, 0.8]}
    reached = module("glyph_diffusion").steps_to_reach({"uniform": slow, "min_snr": fast})
    assert reached == {"uniform": {"uniform": 30, "min_snr": 25}, "min_snr": {"uniform": 30, "min_snr": 10}}


def test_too_few_fonts(module: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("glyph_classifier", "glyph_diffusion"):
        with pytest.raises(SystemExit) as exit:
            module(name).main(["--fonts", str(tmp_path)])
        assert exit.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert f"expected at least 3 families with A-Z, a-z and 0-9 in {tmp_path}, got 0" in printed.err
