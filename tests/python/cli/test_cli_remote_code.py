"""Python code in a model directory runs only if --trust-remote-code is given."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli_helpers import TUNE, refuse, succeed, text
from shoestring import load_quantized
from shoestring.data.tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("blank_images")

MARK = "import os, pathlib; pathlib.Path(os.environ['SHOESTRING_TEST_MARK']).touch()\n"
CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama model whose model_type transformers does not know, with Python code of its own.

    Each Python file of the model creates the file ``mark`` if it is imported.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("own")
    (folder / "text.txt").write_text(text())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = folder / "model"
    LlamaForCausalLM(config).save_pretrained(model)
    train_bpe([folder / "text.txt"], 300).save_pretrained(model)
    (model / "configuration_own.py").write_text(MARK + CONFIGURATION)
    (model / "modeling_own.py").write_text(MARK + MODELING)
    (model / "tokenization_own.py").write_text(MARK + TOKENIZATION)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(model / "config.json", model_type="own-llama", auto_map=own)
    return folder


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOESTRING_TEST_MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


def commands(directory: Path, out: Path) -> dict[str, list[object]]:
    model, data = directory / "model", directory / "text.txt"
    tune = ["finetune", "--model", model, "--data", data, *TUNE, "--steps", 1]
    return {
        "generate": ["generate", "--model", model, "--max-new-tokens", 1, "hello"],
        "estimate": ["estimate", "--model", model],
        "finetune": [*tune, "--out", out / "tuned"],
        "plain": [*tune, "--baseline", "--quantize", "none", "--out", out / "plain"],
    }


@pytest.mark.parametrize("name", ["generate", "estimate", "finetune", "plain"])
def test_code_does_not_run(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: Path, name: str
) -> None:
    line = refuse(capsys, *commands(directory, tmp_path)[name])
    assert "needs the Python code that its auto_map names" in line and "--trust-remote-code" in line
    assert not mark.exists() and sorted(p.name for p in tmp_path.iterdir()) == []


def test_code_runs_where_it_is_trusted(directory: Path, tmp_path: Path, mark: Path) -> None:
    for name in ("generate", "estimate", "finetune"):
        succeed(*commands(directory, tmp_path)[name], "--trust-remote-code")
        # A process imports the model's code only once, so only the first of these commands creates the file
        # `mark`.
        assert mark.exists()


def test_the_library_refuses_too(directory: Path, mark: Path) -> None:
    with pytest.raises(ValueError, match="needs the Python code that its auto_map names"):
        load_quantized(directory / "model")
    assert not mark.exists()
    assert type(load_quantized(directory / "model", trust_remote_code=True)).__name__ == "OwnForCausalLM"


def test_a_tokenizer_with_code(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: Path
) -> None:
    """The tokenizer has Python code of its own, but transformers knows the type of the model."""
    model = tmp_path / "model"
    shutil.copytree(directory / "model", model)
    change(model / "config.json", model_type="llama", auto_map={})
    change(
        model / "tokenizer_config.json", tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    )  # fmt: skip
    arguments = ["generate", "--model", model, "--max-new-tokens", 1, "hello"]
    assert "the tokenizer cannot be loaded (it needs the Python code" in refuse(capsys, *arguments)
    assert not mark.exists()
    succeed(*arguments, "--trust-remote-code")
    assert mark.exists()


@pytest.mark.parametrize("stdin", [pytest.param("closed", marks=pytest.mark.nightly), "yes"])
def test_nothing_is_asked(directory: Path, tmp_path: Path, mark: Path, stdin: str) -> None:
    """The command does not ask for consent: it refuses remote code even if "y" is typed on a terminal."""
    master, slave = pty.openpty()
    os.write(master, b"y\ny\ny\n")
    arguments = [str(a) for a in commands(directory, tmp_path)["generate"]]
    result = subprocess.run(
        [sys.executable, "-m", "shoestring.cli", *arguments], capture_output=True, text=True, timeout=120,
        stdin=slave if stdin == "yes" else subprocess.DEVNULL,
    )  # fmt: skip
    os.close(master)
    os.close(slave)
    assert (result.returncode, result.stdout) == (2, "") and "[y/N]" not in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not mark.exists()
