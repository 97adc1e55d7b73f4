"""Loading a malicious file quickly raises one ValueError, before anything changes."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_models import llama
from shoestring import lora, optim
from shoestring.files.read_file import is_name
from shoestring.files.safetensors_file import open_safetensors
from shoestring.integrations.transformers import load_quantized
from shoestring.integrations.transformers.reader import TensorReader, stored_tensors

HOSTILE = "(.*.*)*(.*.*)*[xyz]"


@contextmanager
def refused(message: str, seconds: float = 30) -> Iterator[None]:
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        yield
    assert time.perf_counter() - start < seconds
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    lora.save_adapter(lora.apply(llama(), target_modules=["q_proj"], rank=2), folder)
    weights = folder / "adapter_model.safetensors"
    # Save the adapter's weights without the digest of the configuration; the digest would reveal every change
    # of the configuration.
    save_file(load_file(weights), weights)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 1e300}, "r: expected an integer from 1 to"),
        ({"r": True}, "r: expected an integer"),
        ({"r": "2"}, "r: expected an integer"),
        ({"r": 10**30}, "r: expected an integer"),
        ({"lora_alpha": [1]}, "lora_alpha: expected a finite number, received .1."),
        ({"lora_alpha": 10**400}, "not valid JSON"),
        ({"lora_alpha": float("nan")}, "not valid JSON"),
        ({"rank_pattern": [1]}, "rank_pattern: expected an object of integers"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: expected an object of finite numbers"),
        ({"rank_pattern": {HOSTILE: 2}}, "runs within limits"),
        ({"alpha_pattern": {"(" * 100_000: 2}}, "not supported"),
        ({"alpha_pattern": {"\ud800": 2}}, "not valid JSON in UTF-8"),
        ({"target_modules": 5}, "target_modules: expected a pattern or a list of names"),
        ({"modules_to_save": [["lm_head"]]}, "modules_to_save: expected a list"),
        ({"modules_to_save": ["a\nb"]}, "modules_to_save: expected a list"),
        ({"bias": {}}, "bias: expected a name"),
        ({"use_dora": "yes"}, "use_dora: expected true or false"),
        ({"lora_dropout": None, "use_rslora": 3}, "use_rslora: expected true or false"),
        ({"peft_type": ["LORA"]}, "peft_type: expected LORA, "),
        (
            {"peft_type": "VERA", "r": 10**9}
            | dict.fromkeys(["init_lora_weights", "lora_alpha", "lora_dropout"]),
            "r: expected an integer from 1 to 65536",
        ),
        ({"use_qalora": ["x" * 10_000]}, "use_qalora: expected null or false"),
        ({"modules_to_save": [""]}, "modules_to_save: expected names of modules, received ''"),
        (
            {"trainable_token_indices": {"embed_tokens": [True]}},
            "trainable_token_indices: expected a list of",
        ),
        ({"trainable_token_indices": [10**6]}, "expected different indices from 0 to 96"),
        ({"trainable_token_indices": {"absent": [1]}}, "trainable_token_indices: expected names of modules"),
        ({"trainable_token_indices": {"\ud800": [1]}}, "not valid JSON in UTF-8"),
        ({"target_parameters": ["x"] * 10_001}, "target_parameters: expected a list of at most 10000 names"),
        ({"ensure_weight_tying": [1]}, "ensure_weight_tying: expected true or false"),
    ],
)
def test_adapter_config(adapter: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    model = llama()
    with refused(message):
        lora.load_adapter(model, tmp_path)
    assert not any("lora" in name for name, _ in model.named_parameters())


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipe, "expected a regular file"),
        (Path.mkdir, "expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "expected a regular file"),
        (lambda path: path.write_text("[" * 1_000_000), "expected JSON of at most|not valid JSON"),
        (lambda path: path.write_text("[" * 100_000), "expected JSON of at most|not valid JSON"),
        (lambda path: path.write_text("9" * 5000), "not valid JSON"),
        (lambda path: path.write_text("[]"), "expected a JSON object"),
        (lambda path: path.write_bytes(b" " * 17_000_000), "at most 16000000 bytes"),
    ],
)
def test_what_a_file_is(adapter: Path, tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "adapter_config.json")
    with refused(message):
        lora.load_adapter(llama(), tmp_path)
    # The index is read, since the folder has no model.safetensors.
    make(tmp_path / "model.safetensors.index.json")
    with refused(message if message != "expected a JSON object" else "not a valid index"):
        stored_tensors(tmp_path)
    make(tmp_path / "config.json")
    with refused(message):
        load_quantized(tmp_path)


def test_pipes_in_place_of_tensors(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    for name in ("adapter_model.safetensors", "model.safetensors"):
        pipe(tmp_path / name)
    with refused("expected a regular file"):
        lora.load_adapter(llama(), tmp_path)
    with refused("expected a regular file"):
        stored_tensors(tmp_path)
    with refused("expected a regular file"):
        optim.load_optimizer(optim.AdamW([torch.ones(3, requires_grad=True)]), tmp_path / "model.safetensors")


def test_more_layers_than_weights(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in (
        ("num_hidden_layers", 100_000_000),
        ("vocab_size", 10**22),
        ("max_position_embeddings", 10**15),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
        try:
            load_quantized(tmp_path)
            # Llama does not use max_position_embeddings, so a hostile value of it may load.
            assert name == "max_position_embeddings"
        except ValueError as error:
            assert "config.json" in str(error)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 100_000_000}))
    with refused("num_hidden_layers: expected at most the 21 tensors of the weights, received 100000000"):
        load_quantized(tmp_path)


def test_bytes_of_bool(tmp_path: Path) -> None:
    save_file({"mask": torch.tensor([True, False])}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1] + b"\x07")
    with TensorReader(stored_tensors(tmp_path)) as reader, refused("expected bytes 0 and 1 for BOOL"):
        reader.read("mask")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups[0]["options"].update(lr="x"), "lr: expected a value as"),
        (lambda groups: groups[0]["options"].update(lr=10**400), "lr: expected a value as|not valid JSON"),
        (
            lambda groups: groups[0]["options"].update(lr=None),
            "lr: expected a number of at least 0, received None",
        ),
        (
            lambda groups: groups[0]["options"].update(eps=None),
            "eps: expected a number of at least 0, received None",
        ),
        (lambda groups: groups[0]["options"].update(betas=5), "betas: expected several values"),
        (lambda groups: groups[0]["options"].update(betas=[0.9, "x"]), "betas: expected a value as"),
        (
            lambda groups: groups[0]["options"].update(state_format=["8bit"]),
            "state_format: expected one value",
        ),
        (lambda groups: groups[0]["options"].update(maximize=7), "maximize: expected a value as False"),
        (lambda groups: groups[0].update(extra=[1]), "expected groups with the options"),
        (lambda groups: groups[0].update(size=1e300), "expected groups with the options"),
        (lambda groups: groups.append(5), "expected groups with the options"),
    ],
)
def test_optimizer_groups(tmp_path: Path, change: Callable[[list[Any]], object], message: str) -> None:
    parameter = torch.ones(5, requires_grad=True)
    parameter.grad = torch.ones(5)
    optimizer = optim.AdamW([parameter], lr=0.25)
    optimizer.step()
    path = tmp_path / "optimizer.safetensors"
    optim.save_optimizer(optimizer, path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    groups = json.loads(metadata["groups"])
    change(groups)
    save_file(tensors, path, {**metadata, "groups": json.dumps(groups)})
    with refused(message):
        optim.load_optimizer(optimizer, path)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_names_from_files_cannot_act_on_a_terminal(tmp_path: Path) -> None:
    """Names of tensors, fields and files in messages are escaped, and are refused where modules are meant."""
    hidden, shown = "x\u202e\x1b[31m", r"x\\u202e\\(x1b|u001b)\[31m"
    model = tmp_path / "model"
    llama().save_pretrained(model)
    plain = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    save_file({**plain, hidden: torch.ones(2)}, model / "model.safetensors", metadata={"format": "pt"})
    with refused(f"not in the architecture, the first is {shown}$"):
        load_quantized(model)
    save_file(plain, model / "model.safetensors", metadata={"format": "pt"})
    for field in ("model_type", "dtype", "hidden_act"):
        (model / "config.json").write_text(json.dumps({**config, field: hidden}))
        with refused(f"does not describe a causal language model .*{shown}"):
            load_quantized(model)
    with refused(f"there is no tensor .{shown}"):
        open_safetensors(model / "model.safetensors", "damaged").load(hidden)
    for names in (hidden, "a\u200b", "a\u2028", "a\x7f", "a\udcff", "a\n"):
        assert not is_name(names)
    assert is_name("käse.漢.😀")
