"""Measure training with weights in a file: memory, bytes that are read, and time, beside their formulas.

    python -m benchmarks.offload.bench_weights                 memory against depth, and reads beside busy cores
    python -m benchmarks.offload.bench_weights --model qlora-8b

The models of ``--model`` have random weights and the shapes of published configurations:

- qlora-8b: QLoRA of Llama-3-8B (vocabulary 128,256), NF4 with nested scales, adapters of rank 16 on all
  linear layers, 512 tokens. The checkpoint (16 GB) is written first, and quantised straight into the file.
- dense-30b: LoRA of a dense bf16 Llama with 30 B parameters, adapters of rank 8 on q and v, 64 tokens. The file
  takes 64 GB. Each block is drawn just before it leaves.
- full-1b: full fine-tuning of the shape of TinyLlama in bf16 with stochastic rounding, 512 tokens; weights of
  the blocks and 8-bit state are on the disk.

Each model trains three steps in a process of its own, because the system keeps the high-water mark of memory
for each process. Predicted memory is the sum of the parts that are printed. Predicted reads follow from the
formulas in docs/guides/larger_models.md. Loading holds the largest dense weight as a whole, and ``patch`` the output
layer, on which it tries the model. ``fio`` gives the rate of the disk; it is left out where it is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.adapters.qlora_memory import MIB, NF4_BYTES, SYSTEM, status
from benchmarks.common import Report, arguments
from benchmarks.random_llama import SIZES, linear_shapes, write_random_llama

STEPS = 3
SHAPES: dict[str, dict[str, int]] = {
    "qlora-8b": {
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "vocab_size": 128_256,
    },
    "dense-30b": {
        "hidden": 6656,
        "intermediate": 17920,
        "layers": 60,
        "heads": 52,
        "kv_heads": 52,
        "vocab_size": 32_000,
    },
    "full-1b": SIZES["1b"],
    # of the table of depths
    "depth": {
        "hidden": 1024,
        "intermediate": 2816,
        "layers": 8,
        "heads": 16,
        "kv_heads": 16,
        "vocab_size": 32_000,
    },
}
SMALL = {"hidden": 256, "intermediate": 704, "layers": 6, "heads": 4, "kv_heads": 4, "vocab_size": 8192}
TOKENS = {"qlora-8b": 512, "dense-30b": 64, "full-1b": 512, "depth": 128}
RANKS = {"qlora-8b": 16, "dense-30b": 8, "depth": 8}
LIMITS = {"qlora-8b": 3.0, "dense-30b": 6.0, "full-1b": 3.0}  # GB of the process's high-water mark
# MiB of the loss's logits at a time: with more, the output layer is read fewer times.
WORKSPACES = {"qlora-8b": 256, "dense-30b": 64, "full-1b": 64, "depth": 64}
PANELS = 3 * 16 * MIB  # of a table: the panel that is read, the one in use, and the room of the one before


def own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=LIMITS, help="measure one large model instead")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that holds the files")
    parser.add_argument("--checkpoint", type=Path, help="of qlora-8b: where the model is, or is written")
    parser.add_argument("--tokens", type=int, help="of a step, instead of the model's own number")
    parser.add_argument("--keep", default="0", help="bytes of blocks that stay, such as 1GiB")
    parser.add_argument("--worker", help=argparse.SUPPRESS)


# ---- formulas ----


def block_bytes(kind: str, shape: dict[str, int]) -> float:
    """Return the bytes of a block's weights that leave; norms stay."""
    each = NF4_BYTES if kind == "qlora-8b" else 2
    return sum(map(math.prod, linear_shapes(shape))) * each


def predicted_parts(kind: str, shape: dict[str, int], tokens: int, keep: int) -> dict[str, float]:
    """Return the parts of the memory of a step, in bytes."""
    hidden, wide, layers = shape["hidden"], shape["intermediate"], shape["layers"]
    narrow = hidden // shape["heads"] * shape["kv_heads"]
    block, table = block_bytes(kind, shape), 2 * shape["vocab_size"] * hidden
    kept = min(keep // block, layers)
    parts = {"kept blocks": float(kept * block), "two blocks in flight": 2 * block if kept < layers else 0.0}
    if kind == "full-1b":
        # A third block is there while changed weights are written. The optimizer frees each gradient when it has
        # stepped the weight. The largest ones are those of the embedding and of the output layer.
        parts["a block that is written"] = block
        parts["embedding and output layer, bf16"] = 2 * table
        parts["gradient of the output layer, fp32 and bf16"] = 1.5 * 2 * table
    else:
        rank = RANKS[kind]
        sizes = linear_shapes(shape) if kind == "qlora-8b" else linear_shapes(shape)[:1] * 2
        adapter = layers * sum(rank * (rows + columns) for rows, columns in sizes)
        parts["panels of the output layer"] = min(PANELS, table)
        parts["adapters and their gradients, fp32"] = adapter * 8
        parts["AdamW's 8-bit state"] = adapter * 2.03
    parts["checkpoints, bf16"] = tokens * hidden * 2 * layers
    of_layer = tokens * 2 * (6 * hidden + 3 * narrow + 4 * wide)
    parts["one layer, or the loss's workspace"] = max(of_layer, WORKSPACES[kind] * MIB)
    return parts


def predicted_reads(kind: str, shape: dict[str, int], tokens: int, keep: int) -> float:
    """Return the bytes that a step reads from the file of weights, without the few rows of the embedding."""
    block = block_bytes(kind, shape)
    away = max(0, shape["layers"] - keep // block)
    reads = 2 * max(0, away - 2) * block
    if kind == "full-1b":
        return reads
    # A product packs its operands into about 10 MiB of the room.
    fit = max(1, int((WORKSPACES[kind] - 10) * MIB / (4 * shape["vocab_size"])) // 16 * 16)
    chunks = math.ceil((tokens - 1) / min(fit, 1024))
    return reads + 2 * chunks * 2 * shape["vocab_size"] * shape["hidden"]


# ---- the process that trains ----


def config_of(shape: dict[str, int]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
    )


def draw(module: nn.Module) -> None:
    """Give a module on the meta device random bf16 weights that do not require gradients."""
    module.to_empty(device="cpu").requires_grad_(False)
    for weight in module.parameters():
        weight.fill_(1) if weight.dim() == 1 else weight.uniform_(-0.03, 0.03)


def dense_model(shape: dict[str, int], to: str, keep: int) -> nn.Module:
    """Build a frozen Llama whose weights were never all in memory, with our products."""
    from transformers import LlamaForCausalLM

    import shoestring

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config_of(shape)).to(torch.bfloat16)
        for name, layer in list(model.model.named_modules()):
            if isinstance(layer, nn.Linear):
                own = shoestring.nn.Linear(
                    layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16
                )
                model.model.set_submodule(name, own)
    model.requires_grad_(False)
    model.model.norm.to_empty(device="cpu").weight.fill_(1)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config)
    shoestring.offload_weights(model, to, keep=keep, param_init_fn=draw)
    return model


def loss_of(model: Any, ids: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the loss of a model for the tokens ``ids``.

    patch() runs a model a few times to try what it changes, and each run reads the whole file. The largest model
    is therefore not patched; only its loss is ours.
    """
    if kind != "dense-30b":
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    import shoestring

    hidden = model.model(input_ids=ids).last_hidden_state
    return shoestring.linear_cross_entropy(
        hidden, model.lm_head.weight, ids, shift=True, workspace_mb=WORKSPACES[kind]
    )


def work(spec: dict[str, Any]) -> None:
    """Train a model in this process; print memory, statistics and seconds of each step as JSON."""
    from shoestring.training import memory

    torch.set_num_threads(spec["threads"])
    memory.import_models()
    import shoestring
    from shoestring import OffloadedWeights

    kind, shape, to, keep = spec["kind"], spec["shape"], f"nvme:{spec['folder']}", spec["keep"]
    phases: dict[str, Any] = {"imports": status()}
    model: Any
    if kind == "qlora-8b":
        model = shoestring.load_quantized(spec["checkpoint"], double_quant=True, to=to, keep=keep)
    elif kind == "full-1b":
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config_of(shape))
        torch.set_default_dtype(torch.float32)
    else:
        model = dense_model(shape, to, keep)
    phases["loaded"] = status()
    model.config.use_cache = False
    model.train()
    options: dict[str, Any] = {}
    if kind == "full-1b":
        options = {"step_in_backward": True, "offload": to, "weight_rounding": "stochastic"}
    else:
        chosen = {} if kind == "qlora-8b" else {"target_modules": ["q_proj", "v_proj"]}
        shoestring.lora.apply(model, rank=RANKS[kind], **chosen)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = shoestring.optim.AdamW(trained, lr=1e-4, state_format="8bit", **options)
    if kind == "full-1b":
        shoestring.offload_weights(model, to, keep=keep, optimizer=optimizer)
    # Weights that have left are not in memory while patch() runs the model.
    if kind != "dense-30b":
        shoestring.patch(model, workspace_mb=WORKSPACES[kind])
    handle = OffloadedWeights.of(model)
    phases["ready"] = status()
    generator = torch.Generator().manual_seed(0)
    last = handle.statistics()
    print(f"ready: {phases}", file=sys.stderr, flush=True)
    # The steps get a high-water mark of their own; that of loading is known already.
    Path("/proc/self/clear_refs").write_text("5")
    for step in range(STEPS):
        ids = torch.randint(shape["vocab_size"], (1, spec["tokens"]), generator=generator)
        began = time.perf_counter()
        loss = loss_of(model, ids, kind)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        now = handle.statistics()
        phases[f"step {step + 1}"] = {
            **status(),
            "seconds": seconds,
            "loss": loss.item(),
            "fetched": now["fetched"] - last["fetched"],
            "written": now["written"] - last["written"],
        }
        last = now
        print(f"step {step + 1}: {phases[f'step {step + 1}']}", file=sys.stderr, flush=True)
    print(json.dumps({"phases": phases, "statistics": last}))


# ---- the tables ----


def measure(
    kind: str, shape: dict[str, int], tokens: int, keep: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train a model in a process of its own; print its memory, reads and time beside the formulas."""
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        checkpoint = options.checkpoint or Path(scratch) / "model"
        if kind == "qlora-8b" and not (checkpoint / "config.json").is_file():
            write_random_llama(checkpoint, **shape)
        spec = {
            "kind": kind,
            "shape": shape,
            "tokens": tokens,
            "keep": keep,
            "threads": options.threads,
            "folder": scratch,
            "checkpoint": str(checkpoint),
        }
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.offload.bench_weights"]
        run = subprocess.run(
            [*command, "--worker", json.dumps(spec)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SYSTEM},
        )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    phases = found["phases"]
    imports, loading, steps = (phases[name]["peak"] for name in ("imports", "ready", f"step {STEPS}"))
    peak = max(loading, steps)
    parts = predicted_parts(kind, shape, tokens, keep)
    expected = sum(parts.values())
    print(f"\n{kind}, {shape['layers']} layers, {tokens} tokens, keep {keep / MIB:.0f} MiB; MiB")
    for name, size in {"imports": imports, **parts}.items():
        print(f"  {name:46} {size / MIB:9.1f}")
    ratio = (steps - imports) / expected
    print(f"  {'predicted for steps, above imports':46} {expected / MIB:9.1f}")
    print(f"  {'measured in steps, above imports':46} {(steps - imports) / MIB:9.1f}   {ratio:.3f} of it")
    print(f"  {'measured while loading, above imports':46} {(loading - imports) / MIB:9.1f}")
    print(f"  {'high-water mark of the process':46} {peak / MIB:9.1f}   {peak / 1e9:.2f} GB")
    for name, phase in phases.items():
        print(f"    after {name:40} {phase['now'] / MIB:9.1f}   high-water mark {phase['peak'] / MIB:9.1f}")
    reads = predicted_reads(kind, shape, tokens, keep)
    for step in range(1, STEPS + 1):
        phase = phases[f"step {step}"]
        print(
            f"  step {step}: {phase['seconds']:8.1f} s, {tokens / phase['seconds']:7.2f} tokens/s, loss {phase['loss']:.4f}, "
            f"read {phase['fetched'] / 1e9:.3f} GB ({phase['fetched'] / reads:.4f} of the formula), "
            f"{phase['fetched'] / phase['seconds'] / 1e9:.2f} GB/s, written {phase['written'] / 1e9:.3f} GB"
        )
    return (
        found
        | {"peak": peak}
        | {"kind": kind, "shape": shape, "tokens": tokens, "expected": expected, "parts": parts}
    )


def busy(threads: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that multiply matrices on as many cores, until they are ended."""
    code = "import torch; torch.set_num_threads(1); a = torch.randn(1024, 1024)\nwhile True: a @ a"
    return [subprocess.Popen([sys.executable, "-c", code]) for _ in range(threads)]


def fio_rate(folder: str, megabytes: int, file: Path) -> float | None:
    """Return fio's rate in bytes/s for reads of 4 MiB past the page cache at a depth of 8, or None without fio."""
    if shutil.which("fio") is None:
        return None
    run = subprocess.run(
        [
            "fio",
            "--name=read",
            f"--filename={file}",
            "--rw=read",
            "--bs=4m",
            "--direct=1",
            "--ioengine=io_uring",
            "--iodepth=8",
            f"--size={megabytes}m",
            "--output-format=json",
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    found = json.loads(run.stdout)
    return float(found["jobs"][0]["read"]["bw_bytes"])


def reads_beside_busy_cores(options: argparse.Namespace) -> dict[str, float]:
    """Measure fio's reads while the cores are idle, and while all of them multiply matrices."""
    rates: dict[str, float] = {}
    megabytes = 64 if options.quick else 2048
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for name, cores in [("idle", 0), ("busy", options.threads), ("idle again", 0)]:
            processes = busy(cores)
            time.sleep(3 if processes else 0)
            try:
                rate = fio_rate(scratch, megabytes, Path(scratch) / "file")
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if rate is None:
                print("\nfio is not installed: the rate of the disk was not measured")
                return {}
            rates[name] = rate
    print("\nReads of 4 MiB past the page cache, fio, a depth of 8; GB/s")
    for name, rate in rates.items():
        print(f"  {name:46} {rate / 1e9:9.2f}")
    return rates


def compare_time(
    away: dict[str, Any], in_memory: dict[str, Any], rates: dict[str, float]
) -> dict[str, float]:
    """Compare the time of a step with that of its products alone, and of its reads alone beside busy cores."""

    def median(found: dict[str, Any], key: str) -> float:
        return statistics.median(found["phases"][f"step {step}"][key] for step in range(1, STEPS + 1))

    times = {
        "step": median(away, "seconds"),
        "the same with all blocks in memory": median(in_memory, "seconds"),
    }
    if rates:
        # Reads are from blocks; those of the panels of the output layer happen in both runs.
        read = median(away, "fetched") - median(in_memory, "fetched")
        times["reads of the blocks at fio's rate beside busy cores"] = read / rates["busy"]
    print("\nTime of a step; s")
    for name, seconds in times.items():
        print(f"  {name:50} {seconds:9.2f}")
    print(f"  {'of the larger of the parts':50} {times['step'] / max(list(times.values())[1:]):9.2f}")
    return times


def main() -> None:
    options = arguments(__doc__ or "", more=own)
    if options.worker:
        work(json.loads(options.worker))
        return
    from shoestring.checkpoint.model import parse_bytes

    keep = 0 if options.keep == "0" else parse_bytes(options.keep)
    report = Report("bench_weights", options)
    if options.model:
        shape = SMALL if options.quick else SHAPES[options.model]
        tokens = options.tokens or (64 if options.quick else TOKENS[options.model])
        found = measure(options.model, shape, tokens, keep, options)
        peak = found["peak"]
        print(f"\n{peak / 1e9:.2f} GB; the aim is at most {LIMITS[options.model]} GB")
        report.data["model"] = found
    else:
        report.data["disk"] = reads_beside_busy_cores(options)
        tokens = options.tokens or TOKENS["depth"]
        shape = SMALL if options.quick else SHAPES["depth"]
        depths = (6, 12) if options.quick else (8, 80)
        report.data["depths"] = [
            measure("depth", {**shape, "layers": depth}, tokens, keep, options) for depth in depths
        ]
        deep = {**shape, "layers": depths[-1]}
        in_memory = measure(
            "depth", deep, tokens, depths[-1] * math.ceil(block_bytes("depth", deep)), options
        )
        report.data["time"] = compare_time(report.data["depths"][-1], in_memory, report.data["disk"])
    report.finish()


if __name__ == "__main__":
    main()
