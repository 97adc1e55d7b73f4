"""The functions to fuzz (readers): how to write valid files for each, and which files to damage."""

import functools
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mutate import mutate_bytes, mutate_json, mutate_lines, mutate_safetensors
from safetensors.torch import load_file, save_file
from torch import nn

import shoestring
from shoestring import lora, optim
from shoestring.data.examples import read_segments
from shoestring.data.records import kind_of
from shoestring.data.text import check_text, find_files
from shoestring.data.token_file import HEADER, MAGIC, read_token_file
from shoestring.data.tokenizer import load_tokenizer
from shoestring.files.safetensors_file import open_safetensors, save_safetensors
from shoestring.integrations.transformers import load_quantized, save_quantized
from shoestring.integrations.transformers.load import load_dense
from shoestring.integrations.transformers.reader import TensorReader, stored_tensors
from shoestring.planning.machine import hardware_profile, write_machine
from shoestring.training.report.metrics import COLUMNS, read_metrics
from shoestring.training.report.write import figures, read_run
from shoestring.training.run.checkpoint import load_checkpoint, save_checkpoint
from shoestring.training.run.models import check_model_directory

Mutator = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Reader:
    """A function that reads files, and how to make its files.

    Args:
        covers: names of the public functions that this reader fuzzes, with their modules.
        make: writes valid files into an empty folder.
        files: maps a file name, or a pattern of names, to the function that damages the file.
        load: calls the reader on the folder.
        errors: the documented exceptions of the reader.
        share: weight with which the fuzzing time is divided among the readers.
        special: whether to also replace a file by a pipe, a folder, a link and the like.
        folder: path of the reader's folder, relative to the temporary folder of the test.
    """

    name: str
    covers: tuple[str, ...]
    make: Callable[[Path], object]
    files: dict[str, Mutator]
    load: Callable[[Path], object]
    errors: tuple[type[Exception], ...] = (ValueError,)
    share: float = 1.0
    special: bool = True
    folder: str = "input"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)


class Small(nn.Module):
    """A small model whose layers have names of a language model; the weights are (12, 8) and (8, 12)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 5)


ADAPTERS: dict[str, Any] = {
    "lora": lora.LoraOptions(
        rank=2, target_modules=["up_proj", "down_proj"], rank_pattern={"layers.0.up_proj": 3}, alpha_pattern={".*down_proj": 4.0},
        modules_to_save=["head"], bias="all",
    ),
    "dora": lora.LoraOptions(rank=2, target_modules=r".*_proj", dora=True),
    "ia3": lora.IA3Options(target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lora.VeraOptions(rank=4, target_modules=["up_proj"], save_projection=False),
}  # fmt: skip


def _adapter(kind: str) -> Reader:
    def make(folder: Path) -> None:
        lora.save_adapter(lora.apply(Small(), ADAPTERS[kind]), folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        if kind == "ia3":  # PEFT may write a regular expression in place of a list of module names
            config["feedforward_modules"] = r".*\.(down|gate)_proj"
        if kind == "lora":
            config["alpha_pattern"] = {r"(?:layers\.)?[01]\.down_proj": 4.0, r"(?=.*up).*_proj": 32.0}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        _forget_digest(folder)

    return Reader(
        f"load_adapter {kind}",
        (
            "adapters.load.load_adapter",
            "adapters.files.read_config",
            "adapters.files.read_weights",
            "files.safetensors_file.open_safetensors",
        ),
        make,
        {"adapter_config.json": mutate_json, "adapter_model.safetensors": mutate_safetensors},
        lambda folder: lora.load_adapter(Small(), folder),
        (ValueError, FileNotFoundError),
    )


def _forget_digest(folder: Path) -> None:
    """Write the weights without shoestring's digest of the configuration, as PEFT does.

    With the digest, load_adapter would refuse every changed configuration.
    """
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})


def _make_tokens(folder: Path) -> None:
    lora.save_adapter(lora.apply(_llama(), lora.PromptOptions(tokens=3)), folder)
    _forget_digest(folder)


@functools.cache
def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def _llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(_config())


def _optimizer(name: str, **options: Any) -> Reader:
    def fresh() -> tuple[nn.Module, Any]:
        model = Small()
        groups = [
            {"params": list(model.layers.parameters())},
            {"params": list(model.head.parameters()), "lr": 0.5},
        ]
        return model, getattr(optim, name)(groups, lr=0.01, **options)

    def make(folder: Path) -> None:
        model, optimizer = fresh()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optim.save_optimizer(optimizer, folder / "optimizer.safetensors")

    return Reader(
        f"load_optimizer {name}",
        ("optim.files.load_optimizer",),
        make,
        {"optimizer.safetensors": mutate_safetensors},
        lambda folder: optim.load_optimizer(fresh()[1], folder / "optimizer.safetensors"),
        (ValueError, OSError),
        share=0.7,
    )


def _parts_of_run() -> tuple[nn.Module, list[Any]]:
    model = Small()
    return model, [
        optim.AdamW(model.layers.parameters(), lr=0.01),
        torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    ]


class _Holder:
    """A part of a run whose state has values of all kinds."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "numbers": {3: (1, None), "x": [torch.ones(2)]},
            "step": 7,
            "rates": (0.1, 0.2),
            "tensor": torch.ones(2, 3),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _make_training(folder: Path) -> None:
    model, optimizers = _parts_of_run()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    path = folder / "run.safetensors"
    shoestring.save_training(path, model, optimizers, step=3, position={"row": 5}, holder=_Holder())


def _load_training(folder: Path) -> None:
    shoestring.load_training(folder / "run.safetensors", *_parts_of_run(), holder=_Holder())


def _mutate_training(data: bytes, rng: random.Random) -> bytes:
    """Damage a training run. Half of the readable results get a fitting checksum, which the reader then accepts."""
    damaged = mutate_safetensors(data, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        path.write_bytes(damaged)
        try:
            file = open_safetensors(path, "")
            tensors = {name: file.load(name) for name in file.tensors()}
            if rng.random() < 0.5:
                save_safetensors(path, tensors, {**file.metadata(), "checksum": file.checksum()})
        except (ValueError, RuntimeError):
            return damaged
        return path.read_bytes()


def _make_averaged(folder: Path) -> None:
    for name in ("a", "b"):
        save_file(Small().state_dict(), folder / f"{name}.safetensors")


def _make_sharded(folder: Path) -> None:
    _llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")


def _read_all(folder: Path) -> None:
    with TensorReader(stored_tensors(folder)) as reader:
        for name in reader.stored:
            reader.read(name)


def _make_quantized(folder: Path) -> None:
    _make_sharded(folder)
    model = load_quantized(folder, quant_type="nf4", double_quant=True)
    save_quantized(model, folder / "quantized")
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    for file in (folder / "quantized").iterdir():
        file.rename(folder / file.name)
    (folder / "quantized").rmdir()


def _make_token_file(folder: Path) -> None:
    tokens = bytes(range(64)) * 4
    (folder / "tokens.bin").write_bytes(HEADER.pack(MAGIC, 300, 2, len(tokens) // 2) + tokens)


def _make_text(folder: Path) -> None:
    (folder / "text.txt").write_text("A text of two lines.\nWith accents: é, 日本, 🙂.\n" * 3)
    (folder / "text.jsonl").write_text('{"text": "one é"}\n\n{"text": "two", "id": 5}\n' * 3)
    (folder / "text.json").write_text('[{"text": "one é"}, {"text": "two", "id": 5}]')


def _make_examples(folder: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Hello"}]}
    (folder / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 3)
    (folder / "completion.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)


class Tokenizer:
    """The attributes of a tokenizer that read_segments uses."""

    chat_template, eos_token, special_tokens_map = None, "</s>", {"eos_token": "</s>"}
    added_tokens_decoder: dict[int, Any] = {}


def _read_examples(folder: Path) -> None:
    for name in ("chat.jsonl", "completion.jsonl"):
        kind = kind_of([folder / name])
        if kind != "text":
            read_segments([folder / name], kind, Tokenizer())


def _make_tokenizer(folder: Path) -> None:
    from shoestring.data.tokenizer import train_bpe

    (folder / "text.txt").write_text("some words and some more words, some of them again " * 20)
    train_bpe([folder / "text.txt"], 300).save_pretrained(folder)


def _trainer() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Small()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return model, [optimizer]


def _make_checkpoint(folder: Path) -> None:
    save_checkpoint(folder.parents[1], 3, *_trainer(), {"tokens": 5, "losses": [1.5, 2.5], "seconds": 0.5})


def _make_former_checkpoint(folder: Path) -> None:
    """Save a checkpoint and delete its checksums, with which every changed file would be refused."""
    _make_checkpoint(folder)
    (folder / "checksums.json").unlink()


def _load_checkpoint(folder: Path) -> None:
    load_checkpoint(folder, *_trainer())


def _make_run(folder: Path) -> None:
    memory = [{"name": "weights", "formula": "4 bytes x 2", "expected": 8, "measured": 9}]
    summary = {
        "baseline": False,
        "train_loss": 1.5,
        "val_loss": None,
        "tokens_per_second": 10.5,
        "peak_memory": 1000,
        "memory": memory,
    }
    (folder / "run.json").write_text(
        json.dumps({"command": "train", "torch": "2", "threads": 2, "fingerprint": {"a": 1}})
    )
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [dict.fromkeys(COLUMNS, 1.0) | {"step": i, "loss": 1.0 / i} for i in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_plan(folder: Path) -> None:
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), blocks)
    plan = shoestring.plan_training(
        model, example=lambda rows: model(torch.ones(rows, 4)).sum(), batch_size=2
    )
    plan.save(folder / "plan.json")


READERS = [
    *(_adapter(kind) for kind in ADAPTERS),
    Reader(
        "load_adapter prompt",
        ("adapters.load.load_adapter",),
        _make_tokens,
        {"adapter_config.json": mutate_json, "adapter_model.safetensors": mutate_safetensors},
        lambda folder: lora.load_adapter(_llama(), folder),
        (ValueError, FileNotFoundError),
    ),
    _optimizer("AdamW"),
    _optimizer("Adafactor"),
    _optimizer("Lion"),
    Reader(
        "load_training",
        ("runs.training_file.load_training",),
        _make_training,
        {"run.safetensors": _mutate_training},
        _load_training,
        (ValueError, OSError),
    ),
    Reader(
        "average_checkpoints",
        ("optim.average_checkpoints.average_checkpoints",),
        _make_averaged,
        {"b.safetensors": mutate_safetensors},
        lambda folder: optim.average_checkpoints(
            [folder / "a.safetensors", folder / "b.safetensors"], folder.parent / "average.safetensors"
        ),
        (ValueError, OSError),
    ),
    Reader(
        "stored_tensors",
        ("integrations.transformers.reader.stored_tensors", "integrations.transformers.reader.read_config"),
        _make_sharded,
        {
            "model.safetensors.index.json": mutate_json,
            "model-*.safetensors": mutate_safetensors,
        },
        _read_all,
    ),
    Reader(
        "load_quantized",
        (
            "integrations.transformers.load.load_quantized",
            "integrations.transformers.load.refuse_adapter",
            "integrations.transformers.reader.read_config",
        ),
        _make_sharded,
        {
            "config.json": mutate_json,
            "generation_config.json": mutate_json,
            "model.safetensors.index.json": mutate_json,
        },
        load_quantized,
        share=2,
    ),
    Reader(
        "load_quantized 4-bit",
        ("integrations.transformers.load.load_quantized",),
        _make_quantized,
        {"config.json": mutate_json, "model.safetensors": mutate_safetensors},
        load_quantized,
        share=2,
    ),
    Reader(
        "load_dense",
        ("integrations.transformers.load.load_dense",),
        _make_sharded,
        {"config.json": mutate_json, "model-*.safetensors": mutate_safetensors},
        lambda folder: load_dense(folder, dtype=torch.bfloat16, device="cpu"),
    ),
    Reader(
        "check_model_directory",
        ("training.run.models.check_model_directory", "training.run.models.ModelDirectory"),
        _make_sharded,
        {"config.json": mutate_json, "model.safetensors.index.json": mutate_json},
        check_model_directory,
    ),
    Reader(
        "read_token_file",
        ("data.token_file.read_token_file",),
        _make_token_file,
        {"tokens.bin": mutate_bytes},
        lambda folder: read_token_file(folder / "tokens.bin")[0].sum(),
        share=0.3,
    ),
    Reader(
        "check_text",
        (
            "data.text.check_text",
            "data.text.find_files",
            "data.lines.read_text",
            "data.records.read_records",
            "data.records.kind_of_file",
            "data.formats.why_unsupported",
            "data.formats.looks_like_json",
            "data.text.documents",
        ),
        _make_text,
        {"text.txt": mutate_bytes, "text.jsonl": mutate_lines, "text.json": mutate_json},
        lambda folder: check_text(find_files([folder], tell=lambda line: None)),
        share=0.5,
    ),
    Reader(
        "read_segments",
        ("data.records.kind_of", "data.examples.read_segments"),
        _make_examples,
        {"chat.jsonl": mutate_lines, "completion.jsonl": mutate_lines},
        _read_examples,
        share=0.5,
    ),
    Reader(
        "load_tokenizer",
        ("data.tokenizer.load_tokenizer",),
        _make_tokenizer,
        {"tokenizer.json": mutate_json, "tokenizer_config.json": mutate_json},
        load_tokenizer,
    ),
    Reader(
        "load_checkpoint",
        ("training.run.checkpoint.load_checkpoint",),
        _make_former_checkpoint,
        {"weights.safetensors": mutate_safetensors, "state.json": mutate_json, "optimizer.pt": mutate_bytes},
        _load_checkpoint,
        special=False,  # no pipes, links and the like: a training run itself wrote this folder
        folder="checkpoints/step-00000003",
    ),
    Reader(
        "load_checkpoint checksums",
        ("training.run.checkpoint.load_checkpoint",),
        _make_checkpoint,
        {"checksums.json": mutate_json},
        _load_checkpoint,
        share=0.5,
        special=False,
        folder="checkpoints/step-00000003",
    ),
    Reader(
        "hardware_profile",
        ("planning.machine.hardware_profile", "planning.machine.read_machine"),
        lambda folder: write_machine(folder / "machine.json", hardware_profile("nvidia-h200")),
        {"machine.json": mutate_json},
        lambda folder: hardware_profile(folder / "machine.json"),
        (ValueError, FileNotFoundError),
        share=0.5,
    ),
    Reader(
        "TrainingPlan.load",
        (),  # a method, and the table is of functions
        _make_plan,
        {"plan.json": mutate_json},
        lambda folder: shoestring.TrainingPlan.load(folder / "plan.json"),
        (ValueError,),
        share=0.5,
    ),
    Reader(
        "read_run",
        ("training.report.write.read_run", "training.report.metrics.read_metrics"),
        _make_run,
        {"run.json": mutate_json, "summary.json": mutate_json, "metrics.jsonl": mutate_lines},
        lambda folder: (figures(read_run(folder)), read_metrics(folder / "metrics.jsonl")),
        share=0.5,
    ),
]

# Public functions that take a path but need no fuzzer, each with the reason.
NOT_READERS = {
    **dict.fromkeys(
        ("files.lock.locked", "files.atomic.atomic_file", "files.atomic.atomic_directory",
         "files.atomic.write_json", "files.atomic.remove_partial", "files.write_file.naming",
         "files.write_file.open_to_write", "files.write_file.write_text", "files.safetensors_file.save_safetensors",
         "files.safetensors_file.save_gathered",
         "data.token_file.write_token_file", "adapters.files.save_adapter", "optim.files.save_optimizer",
         "adapters.save_pretrained.save", "core.save_pretrained.register",
         "runs.training_file.save_training",
         "integrations.transformers.save.save_quantized", "training.run.adapters.save_adapter", "training.run.checkpoint.save_checkpoint",
         "training.report.write.write_report", "training.report.write.write_comparison", "training.report.write.write_sections",
         "cli.demo_data.standard_library", "cli.demo_data.package_documentation", "training.report.metrics.MetricsLog",
         "cli.app.monitor", "cli.monitor.run", "runs.callbacks.TensorBoard", "planning.machine.write_machine"),
        "writes",
    ),
    **dict.fromkeys(
        ("cli.app.demo", "cli.app.finish", "cli.app.plan", "cli.plan.plan", "cli.demo.demo", "cli.finetune.finetune",
         "cli.tokenize.tokenize", "cli.app.compare", "cli.app.tokenize", "cli.app.train", "cli.app.generate", "cli.app.finetune",
         "cli.app.estimate", "cli.train.train", "cli.turns.Command", "cli.turns.run_in_turns", "training.run.folder.open_run",
         "training.run.execute.execute", "training.run.folder.Run", "training.run.folder.prepare_tokens", "training.run.digests.require_prepared", "training.report.write.read_runs", "adapters.config_digest.check_pair", "data.tokenizer.train_bpe",
         "planning.measure.measure_machine"),
        "calls the readers above",
    ),
    **dict.fromkeys(
        ("data.records.holds_records", "training.run.positions.check_positions", "data.text.size_of", "files.atomic.exchange_obstacle", "training.run.checkpoint.step_of", "training.run.digests.file_list", "training.run.digests.model_files", "training.run.checkpoint.checkpoints", "files.read_file.check_regular",
         "integrations.transformers.reader.Stored", "training.report.write.FinishedRun"),
        "looks at names and sizes alone",
    ),
    **dict.fromkeys(
        ("cli.config.Source", "cli.config.GenerateConfig", "training.config.TrainConfig"), "holds options"
    ),
    **dict.fromkeys(
        ("files.read_file.read_regular", "files.read_file.read_json", "adapters.base_record.check_peft_base",
         "adapters.base_record.check_base_record", "adapters.base_record.refuse_base"),
        "what the readers above are made of",
    ),
    "cli.generate.check_adapter": "load_adapter reads the same folder after it",
    "training.run.adapters.merge_adapter": "load_adapter, or PEFT",
}  # fmt: skip

assert shoestring.__version__  # importing shoestring registers the operators
