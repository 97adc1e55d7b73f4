"""Test that Python and C++ refuse a configuration file and a weights file that were not saved together.

A user may edit fields of the configuration file that do not change what the adapter computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_lora_cpp import APPLY, Model, adapted, close, output, program_in, train

from shoestring import lora
from shoestring.adapters.config_digest import KEY, config_digest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return program_in(tmp_path)


def refused(folder: Path, run: Run) -> None:
    """Check that Python and C++ refuse to load the folder, with an error that names both files."""
    message = f"{folder / WEIGHTS}: expected the weights that were saved with {folder / CONFIG}"
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(Model(), folder)
    with pytest.raises(AssertionError, match=message):
        run(f"load={folder}")


def loads(folder: Path, run: Run) -> None:
    close(run(f"load={folder}", "forward")["forward"], output(lora.load_adapter(Model(), folder)))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(
        json.dumps({name: value for name, value in config.items() if value != "absent"})
    )


def test_files_of_two_saves_are_refused(run: Run, tmp_path: Path) -> None:
    for language in ("python", "cpp"):
        for alpha in (6, 7):
            folder = tmp_path / f"{language}{alpha}"
            if language == "python":
                lora.save_adapter(adapted(alpha=alpha), folder)
            else:
                run("seed=3", APPLY.replace("alpha:6", f"alpha:{alpha}"), f"save={folder}")
            loads(folder, run)
        shutil.copy(tmp_path / f"{language}6" / CONFIG, folder / CONFIG)
        refused(folder, run)
    for name in ("python", "cpp"):  # Python and C++ compute the same digest of the same configuration.
        with safe_open(tmp_path / f"{name}6" / WEIGHTS, "pt") as file:
            assert file.metadata()[KEY] == config_digest(
                json.loads((tmp_path / f"{name}6" / CONFIG).read_text())
            )


def test_which_changes_of_the_configuration_count(run: Run, tmp_path: Path) -> None:
    lora.save_adapter(train(adapted()), tmp_path / "saved")
    descriptions = {
        "base_model_name_or_path": "another/name", "revision": "main", "task_type": "CAUSAL_LM",
        "inference_mode": False, "peft_version": "0.21", "auto_mapping": {"a": 1},
    }  # fmt: skip
    same = {
        "target_modules": ["up_proj", "down_proj"], "lora_alpha": 6.0, "use_dora": "absent", "rank_pattern": None,
        "layers_pattern": [], "bias": "none",
        # fields of a newer PEFT, which are off
        "use_new": False, "new_config": None, "new_names": [], "new_pattern": {},
    }  # fmt: skip
    for number, changes in enumerate(
        [descriptions, same, {**same, "target_modules": ["down_proj", "up_proj"]}]
    ):
        folder = Path(shutil.copytree(tmp_path / "saved", tmp_path / f"edited{number}"))
        edit(folder, **changes)
        loads(folder, run)
    different = {
        "lora_alpha": 6.5, "use_rslora": True, "lora_dropout": 0.1, "alpha_pattern": {"up_proj": 1}, "bias": "all"
    }  # fmt: skip
    for name, value in different.items():
        folder = Path(shutil.copytree(tmp_path / "saved", tmp_path / name))
        edit(folder, **{name: value})
        refused(folder, run)


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({}, "use_new", True),
        ({}, "new_config", {"a": "\u202e" * 1000}),
        ({}, "new\u202e\n" * 100, 0),
        ({}, "d_initial", 0.1),  # a field of VeRA
        ({"config": lora.VeraOptions, "rank": 8}, "use_dora", True),
        ({"config": lora.IA3Options}, "bias", "all"),
    ],
    ids=range(6),
)
def test_fields_that_are_not_known_are_refused(
    options: dict[str, Any], name: str, value: Any, run: Run, tmp_path: Path
) -> None:
    lora.save_adapter(adapted(**options), tmp_path)
    edit(tmp_path, **{name: value})
    message = (
        "expected null, false or an empty value, since this version of shoestring does not know the field"
    )
    for load, error in (
        (lambda: lora.load_adapter(Model(), tmp_path), ValueError),
        (lambda: run(f"load={tmp_path}"), AssertionError),
    ):
        with pytest.raises(error, match=message) as refusal:
            load()
        text = str(refusal.value).partition("\nassert")[0].strip()
        assert name[:3] in text and "received" in text and "Use a newer version" in text
        assert text.isprintable() and len(text) < 700 + len(str(tmp_path))


def test_a_configuration_that_peft_wrote_again_still_fits(run: Run, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ia3 = {"config": lora.IA3Options, "feedforward_modules": ["down_proj"]}
    for number, options in enumerate([{}, ia3, {"config": lora.VeraOptions, "rank": 8}]):
        folder = tmp_path / str(number)
        lora.save_adapter(train(adapted(**options)), folder)
        before = (folder / CONFIG).read_text()
        peft.PeftConfig.from_pretrained(str(folder)).save_pretrained(str(folder))
        # PEFT writes its default values too, and writes sets in another order.
        assert (folder / CONFIG).read_text() != before
        loads(folder, run)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 1e-5, "lora_dropout": 0.1},
        {"lora_alpha": 1.7976931348623157e308, "alpha_pattern": {"a": 2**63 + 1}},
        {"lora_alpha": 5e-324, "rank_pattern": {"a": 2**31 - 1}, "layers_to_transform": [3, 1, 2]},
        {"alpha_pattern": {"Grüße": 1, "日本\n\"": 2, "a": 0.1}, "rank_pattern": {"\u0000": 3}},
        {"exclude_modules": "a.*b", "layers_pattern": ["b", "a"], "layers_to_transform": 0},
    ],
    ids=range(5),
)  # fmt: skip
@pytest.mark.sample(3)
def test_both_languages_read_every_value_alike(changes: dict[str, Any], run: Run, tmp_path: Path) -> None:
    lora.save_adapter(adapted(), tmp_path)
    saved = (tmp_path / CONFIG).read_text()
    edit(tmp_path, **changes)
    digest = config_digest(json.loads((tmp_path / CONFIG).read_text()))
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS, metadata={"format": "pt", KEY: digest})
    # Both languages refuse weights whose digest is not that of the configuration.
    run(f"load={tmp_path}")
    lora.load_adapter(Model(), tmp_path, any_base=True)
    (tmp_path / CONFIG).write_text(saved)
    refused(tmp_path, run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", -0.0),
        ("r", 2.5),
        ("r", 10**25),
        ("rank_pattern", {"a": 2**63 + 1}),
        ("rank_pattern", {"a": -(2**53) - 1}),
        ("layers_pattern", [[1, [2]], {"a": [3]}]),
    ],
    ids=range(6),
)
@pytest.mark.sample(3)
def test_both_languages_refuse_the_same_values(name: str, value: Any, run: Run, tmp_path: Path) -> None:
    lora.save_adapter(adapted(), tmp_path)
    edit(tmp_path, **{name: value})
    message = f"{CONFIG}: {name}: expected an? .*, received "
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(Model(), tmp_path)
    with pytest.raises(AssertionError, match=message):
        run(f"load={tmp_path}")
