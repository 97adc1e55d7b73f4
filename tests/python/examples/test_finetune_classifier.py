"""Test finetune_classifier.py: the text that it reads, what each method trains and needs, and its command line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

# The words that the functions of each module use; the classes are four, so guessing gives an accuracy of 0.25.
MODULES = {
    "garden": "rose tulip hedge lawn spade seed".split(),
    "kitchen": "knife oven flour salt spoon plate".split(),
    "harbour": "boat rope sail anchor pier crane".split(),
    "school": "chalk desk book ruler pencil exam".split(),
}
SHARED = "the value of a name and its result".split()
FUNCTIONS = 20  # of each module


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples/python"))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Write a folder of modules whose docstrings hold words of their module, and the module's name."""
    folder, chance = tmp_path / "library", random.Random(0)
    (folder / "garden").mkdir(parents=True)
    for module, words in MODULES.items():
        source = ""
        for i in range(FUNCTIONS):
            text = " ".join(chance.sample(words, 4) + chance.sample(SHARED, 3))
            source += f'def f{i}(x):\n    """Use {module} or {module.title()}Error: {text}, {i}."""\n    return x\n\n'
        (folder / ("garden/plants.py" if module == "garden" else f"{module}.py")).write_text(source)
    return folder


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """Save an encoder with random weights."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path / "encoder"
    words = [*SHARED, *(word for words in MODULES.values() for word in words), *"use or def return x".split()]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def test_the_text_does_not_name_the_module(library: Path) -> None:
    from finetune_classifier import read_data

    data = read_data(library, classes=4)
    assert sorted(data.classes) == sorted(MODULES)
    assert len(data.train) == 4 * 16 and len(data.held_out) == 4 * 4
    assert not {example.text for example in data.train} & {example.text for example in data.held_out}
    for example in data.train + data.held_out:
        words = example.text.lower().replace(",", "").split()
        assert len(set(words) & set(MODULES[data.classes[example.label]])) == 4
        assert not any(name in example.text.lower() for name in MODULES)


def test_each_method_learns_in_its_memory(encoder: Path, library: Path, tmp_path: Path) -> None:
    from finetune_classifier import METHODS, main

    report = tmp_path / "report.json"
    folders = ["--model", str(encoder), "--library", str(library), "--json", str(report)]
    found = main(["--classes=4", "--steps=40", "--rank=4", "--threads=1", *folders])
    assert json.loads(report.read_text()) == found
    runs: dict[str, dict[str, Any]] = {run["method"]: run for run in found["runs"]}
    assert list(runs) == list(METHODS)
    head, unfreezing, lora, full = runs.values()
    for run in runs.values():
        assert run["accuracy"] > 0.6
        assert [point["step"] for point in run["curve"]] == [13, 27, 40]
        assert run["seconds"] == run["curve"][-1]["seconds"] > 0

    assert head["trained_parameters"] == 4 * (64 + 1)
    assert head["trained_parameters"] < lora["trained_parameters"] < full["trained_parameters"]
    assert unfreezing["trained_parameters"] == full["trained_parameters"]
    # Unfreezing begins with the memory of the head, and ends with that of full fine-tuning.
    state = [point["state_bytes"] for point in unfreezing["curve"]]
    assert unfreezing["first_state_bytes"] == head["first_state_bytes"] == head["largest_state_bytes"]
    assert unfreezing["first_state_bytes"] < 0.1 * unfreezing["largest_state_bytes"]
    assert state == sorted(state) and state[0] < 0.7 * state[-1]
    assert unfreezing["largest_state_bytes"] == pytest.approx(full["largest_state_bytes"], rel=0.02)
    assert unfreezing["mean_state_bytes"] < 0.9 * full["mean_state_bytes"]
    assert lora["largest_state_bytes"] < 0.5 * full["largest_state_bytes"]
    # Gradients alone take 4 bytes for each trained parameter.
    for run in runs.values():
        assert run["largest_state_bytes"] > 4 * run["trained_parameters"]
    # A frozen encoder saves nothing for backward.
    assert head["curve"][0]["saved_bytes"] < 0.1 * full["curve"][0]["saved_bytes"]


def test_rates_fall_from_layer_to_layer(encoder: Path) -> None:
    from finetune_classifier import HEAD_LR, Classifier, Method, parameter_groups

    model = Classifier(encoder, 4)
    groups = parameter_groups(model, Method(lr=1e-3, decay=0.5))
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert rates[model.head.weight] == HEAD_LR
    assert rates[model.body.encoder.layer[1].output.dense.weight] == 1e-3
    assert rates[model.body.encoder.layer[0].output.dense.weight] == 0.5e-3
    assert rates[model.body.embeddings.word_embeddings.weight] == 0.25e-3


def test_the_figure_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from finetune_classifier import METHODS, main

    pages = Path(__file__).parents[3] / "docs/examples"
    report = Path(shutil.copy(pages / "classifier.json", tmp_path))
    main(["--plot", str(report)])
    for picture in (report.with_suffix(".svg"), pages / "classifier.svg"):
        text = picture.read_text()
        assert "<svg" in text and len(text) < 100_000
        assert all(f">{name}</text>" in text for name in METHODS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "argument --steps: expected a whole number of at least 1, got 0."),
        (["--classes=9"], "argument --library: expected 9 modules with at least 5 functions each, got 4 in"),
        (["--model=nowhere"], "argument --model: expected a folder with config.json, got nowhere."),
        (["--plot=nowhere"], "argument --plot: expected a file that --json has written, got nowhere."),
        (["--methods=all"], "argument --methods: invalid choice: 'all'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, encoder: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune_classifier import main

    with pytest.raises(SystemExit) as exit:
        main(["--model", str(encoder), "--library", str(library), *arguments])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
