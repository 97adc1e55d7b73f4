"""Save and load files for test_saves.py, with the commands of saves.cpp.

The program imports its modules once, and forks for every save. Run it with libkill_at.so in LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoestring
from shoestring import lora
from shoestring.core.errors import InputError
from shoestring.data.token_file import read_token_file, write_token_file
from shoestring.data.tokenizer import load_tokenizer, train_bpe
from shoestring.files.atomic import atomic_directory, write_json
from shoestring.integrations.transformers.reader import TensorReader, read_config, stored_tensors
from shoestring.optim import AdamW, load_optimizer, save_optimizer
from shoestring.training.run.checkpoint import checkpoints, load_checkpoint, save_checkpoint

OLD, NEW = 1, 2


@dataclass
class Save:
    # called with (folder, value); saves the old state of the files for value 1 (OLD), and the new state for 2
    # (NEW)
    save: Callable[[Path, int], None]
    load: Callable[[Path], float]


def value_of(tensors: Sequence[Tensor]) -> float:
    """Return the value that all elements of the tensors have, or NaN if they differ."""
    value = tensors[0].flatten()[0].item()
    return value if all(bool((tensor == value).all()) for tensor in tensors) else float("nan")


class Model(nn.Module):
    """The model that saves.cpp uses, too: two linear layers without bias."""

    def __init__(self, value: float = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


# ---- adapters: old and new tensors have the same shapes, and only the configuration file contains alpha --


def save_adapter(folder: Path, value: int, rank: int = 4) -> None:
    model = lora.apply(Model(), rank=rank, alpha=4 if value == OLD else 32, target_modules=["up", "down"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.constant_(parameter, 0.5 if "lora_A" in name else value)
    lora.save_adapter(model, folder / "adapter")


def load_adapter(folder: Path) -> float:
    model = lora.load_adapter(Model(), folder / "adapter", any_base=True)
    with torch.no_grad():
        up, down = value_of([model.up(torch.ones(1, 8))]), value_of([model.down(torch.ones(1, 16))])
    # Expected outputs are alpha / rank * lora_B * lora_A * ones: 16 and 32 for the old adapter, 256 and 512
    # for the new one.
    return {(16, 32): OLD, (256, 512): NEW}.get((up, down), up)


# ---- saves that write one file ---------------------------------------------------------------------------


def load_safetensors(folder: Path) -> float:
    return value_of(list(load_file(folder / "file.safetensors").values()))


def make_optimizer(value: float) -> AdamW:
    return AdamW([torch.zeros(300, requires_grad=True)], lr=0.1 * value)


def save_state(folder: Path, value: int) -> None:
    optimizer = make_optimizer(value)
    for _ in range(value):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(300)
        optimizer.step()
    save_optimizer(optimizer, folder / "optimizer.safetensors")


def load_state(folder: Path) -> float:
    optimizer = make_optimizer(5)
    load_optimizer(optimizer, folder / "optimizer.safetensors")
    group = optimizer.param_groups[0]
    steps = float(optimizer.state[group["params"][0]]["step"])
    return steps if group["lr"] == 0.1 * steps else float("nan")


class Words:
    """A tokenizer that maps each word to its length; token 0 ends a text."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 100

    def get_vocab(self) -> dict[str, int]:
        return {"x" * length: length for length in range(100)}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


def save_tokens(folder: Path, value: int) -> None:
    text = folder / f"text{value}"
    text.write_text("x" * value + " ")
    write_token_file(folder / "tokens.bin", [text], Words())


def load_tokens(folder: Path) -> float:
    tokens, _ = read_token_file(folder / "tokens.bin")
    return float(tokens[0]) if len(tokens) == 2 else float("nan")


def load_record(folder: Path) -> float:
    return json.loads((folder / "run.json").read_text())["value"]


# ---- saves that write a folder ---------------------------------------------------------------------------


def save_run_checkpoint(folder: Path, value: int, steps: Sequence[int] = (3,)) -> None:
    """Save checkpoints of a training run: of steps 1 and 2 for the state OLD, and of ``steps`` for NEW.

    The states OLD and NEW are those before and after the tested save. Saving the checkpoint of step 3 removes
    the checkpoint of step 1.
    """
    for step in (1, 2) if value == OLD else steps:
        model, optimizer = Model(value), make_optimizer(value)
        save_checkpoint(
            folder, step, model, [optimizer], {"val_loss": None, "best_val_loss": None, "value": value}
        )


def load_run_checkpoint(folder: Path) -> float:
    newest = checkpoints(folder)[-1]
    model, optimizer = Model(), make_optimizer(5)
    state = load_checkpoint(newest, model, [optimizer])
    value = value_of([*model.parameters(), torch.tensor([float(state["value"])])])
    return value if optimizer.param_groups[0]["lr"] == 0.1 * value else float("nan")


def language_models() -> dict[int, tuple[nn.Module, nn.Module]]:
    """Return a dense and a quantised model for each state, OLD and NEW. A model of OLD has more shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = {}
    for value in (OLD, NEW):
        torch.manual_seed(value)
        config = LlamaConfig(
            vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config).bfloat16()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            found[value] = (
                model,
                shoestring.load_quantized(folder, quant_type="nf4" if value == OLD else "int8"),
            )
    return found


def which(models: dict[int, dict[str, Tensor]], loaded: dict[str, Tensor]) -> float:
    for value, expected in models.items():
        if expected.keys() == loaded.keys() and all(
            torch.equal(loaded[name], t) for name, t in expected.items()
        ):
            return value
    return float("nan")


def saves() -> dict[str, Save]:
    models = language_models()
    dense = {value: pair[0].state_dict() for value, pair in models.items()}
    quantized = {value: pair[1].state_dict() for value, pair in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_text("a text of some words " * 20)
        tokenizers = {value: train_bpe([text], 255 + 10 * value) for value in (OLD, NEW)}

    def save_quantized(folder: Path, value: int, overwrite: bool = False) -> None:
        size = 8_000 if value == OLD else 20_000
        shoestring.save_quantized(
            models[value][1], folder / "model", max_shard_bytes=size, overwrite=overwrite
        )

    def load_quantized(folder: Path) -> float:
        return which(quantized, shoestring.load_quantized(folder / "model").state_dict())

    def save_result(folder: Path, value: int) -> None:
        with atomic_directory(folder / "model") as partial:
            models[value][0].save_pretrained(partial, max_shard_size="20KB" if value == OLD else "1GB")
            tokenizers[value].save_pretrained(partial)

    def load_result(folder: Path) -> float:
        read_config(folder / "model")
        stored = stored_tensors(folder / "model")
        with TensorReader(stored) as reader:
            value = which(dense, {name: reader.read(name) for name in stored})
        return value if len(load_tokenizer(folder / "model")) == len(tokenizers[int(value)]) else float("nan")

    def save_tokenizer(folder: Path, value: int) -> None:
        with atomic_directory(folder / "tokenizer") as partial:
            tokenizers[value].save_pretrained(partial)

    def load_trained(folder: Path) -> float:
        size = len(load_tokenizer(folder / "tokenizer"))
        return next(value for value, tokenizer in tokenizers.items() if len(tokenizer) == size)

    def load_model(folder: Path) -> float:
        stored = stored_tensors(folder)
        with TensorReader(stored) as reader:
            return value_of([reader.read(name) for name in stored])

    def nothing(folder: Path, value: int) -> None:
        raise NotImplementedError("saves.cpp has it")

    return {
        "safetensors": Save(nothing, load_safetensors),
        "model": Save(nothing, load_model),
        "adapter": Save(save_adapter, load_adapter),
        "adapter_rank": Save(lambda f, value: save_adapter(f, value, 4 if value == OLD else 8), load_adapter),
        "optimizer": Save(save_state, load_state),
        "tokens": Save(save_tokens, load_tokens),
        "record": Save(lambda folder, value: write_json(folder / "run.json", {"value": value}), load_record),
        "checkpoint": Save(save_run_checkpoint, load_run_checkpoint),
        "checkpoint_again": Save(lambda f, value: save_run_checkpoint(f, value, [2]), load_run_checkpoint),
        "tokenizer": Save(save_tokenizer, load_trained),
        "result": Save(save_result, load_result),
        "result_in_place": Save(save_result, load_result),
        "quantized": Save(save_quantized, load_quantized),
        "quantized_in_place": Save(lambda f, value: save_quantized(f, value, overwrite=True), load_quantized),
    }


def killed_at(n: int, save: Save, folder: Path, value: int, exchanges: bool) -> str:
    """Save in a forked process that kill_at.cpp kills before its n-th counted system call, unless n is 0."""
    library = ctypes.CDLL(None)
    library.calls_counted.restype = ctypes.c_long
    child = os.fork()
    if child == 0:
        status = 1
        try:
            library.kill_at(ctypes.c_long(n), ctypes.c_bool(exchanges))
            save.save(folder, value)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return f"{'killed' if killed else 'failed' if status else 'saved'} {library.calls_counted()}"


def check(save: Save, folder: Path) -> str:
    try:
        value = save.load(folder)
    except (ValueError, InputError, FileNotFoundError) as error:
        return f"refused {error}".replace("\n", " ")
    except Exception:
        return f"mixed {traceback.format_exc()!r}"
    return {OLD: "old", NEW: "new"}.get(int(value) if value == value else 0, f"mixed {value}")


def main() -> None:
    torch.set_num_threads(1)  # one thread, because forked processes do not inherit PyTorch's worker threads
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to stderr, so that stdout has only the replies
    known = saves()
    for line in sys.stdin:
        command, name, folder, *rest = line.split()
        if command == "check":
            print(check(known[name], Path(folder)), file=replies)
        else:
            version, n, exchanges = rest
            value = OLD if version == "old" else NEW
            print(killed_at(int(n), known[name], Path(folder), value, exchanges == "1"), file=replies)


if __name__ == "__main__":
    main()
