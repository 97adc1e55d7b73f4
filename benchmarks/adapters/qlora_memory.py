"""Measure the memory of QLoRA training of a 1 B model, and predict it: ``bench_qlora.py --memory``.

The model has random weights (2.2 GB) and is written to --model or to a temporary folder. Each measured
program runs in a new process, because the system keeps the high-water mark of memory per process.
"""

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.random_llama import SIZES, linear_shapes, write_random_llama

RANK = 16
NF4_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256  # of a weight with nested scales
MIB = 2**20
# By default, glibc's malloc raises its mmap threshold. It then keeps freed blocks of up to 32 MiB in its
# heap, in between blocks that are in use. With a fixed threshold, malloc returns all larger blocks to the
# system when they are freed.
SYSTEM = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


def predicted_bytes(shape: dict[str, int], tokens: int, workspace: int) -> dict[str, float]:
    """Return the predicted bytes of each part of the memory; benchmarks/README.md explains the formula.

    The base weights are NF4 with nested scales. Every linear layer has fp32 adapters, and the optimizer is
    8-bit AdamW.
    """
    hidden, wide, layers = shape["hidden"], shape["intermediate"], shape["layers"]
    narrow = hidden // shape["heads"] * shape["kv_heads"]
    linear = linear_shapes(shape)
    adapter = layers * sum(RANK * (rows + columns) for rows, columns in linear)
    # bf16 activations of the one layer that backward recomputes. These activations are the inputs of both
    # norms and of all linear layers, and the tensors q, k, v, attention output, gate and up. The projections
    # to q, k and v have one common input, and so have those to gate and up. The remaining terms are for
    # gradients of the widest tensors.
    of_layer = tokens * 2 * (6 * hidden + 3 * narrow + 4 * wide)
    return {
        "linear weights, 4.127 bits": layers * sum(map(math.prod, linear)) * NF4_BYTES,
        "embedding and head, bf16": 2 * 2 * shape["vocab_size"] * hidden,
        "adapters, fp32, and their gradients": adapter * (4 + 4),
        "AdamW's 8-bit state": adapter * 2.03,
        "checkpoints, bf16": tokens * hidden * 2 * layers,
        "one layer, or the loss's workspace": max(of_layer, workspace),
    }


def status() -> dict[str, int]:
    """Return the resident memory of this process in bytes, now and at its peak."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {"now": int(fields["VmRSS"].split()[0]) * 1024, "peak": int(fields["VmHWM"].split()[0]) * 1024}


def measure(folder: Path, tokens: int, workspace_mb: int, vocab_size: int) -> None:
    """Load, quantise and train a model in this process, as a QLoRA script does.

    Prints the memory of the process after each phase as JSON.
    """
    from shoestring.training import memory

    memory.import_models()
    import shoestring

    phases = {"imports": status()}
    model = shoestring.load_quantized(folder, double_quant=True)
    phases["loaded"] = status()
    shoestring.lora.apply(model.train(), rank=RANK)
    shoestring.patch(model, workspace_mb=workspace_mb)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    optimizer = shoestring.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        began = time.perf_counter()
        ids = torch.randint(vocab_size, (1, tokens), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        phases[f"step {step + 1}"] = {**status(), "seconds": time.perf_counter() - began}
    print(json.dumps(phases))


def memory_python(
    folder: Path, shape: dict[str, int], tokens: int, options: argparse.Namespace
) -> dict[str, object]:
    """Run ``measure`` in a new process, and print the memory of its phases and the prediction."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.adapters.qlora_memory",
        folder,
        tokens,
        options.workspace_mb,
        shape["vocab_size"],
    ]
    command = [str(word) for word in (*command, options.threads)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_environment(options))
    phases = json.loads(run.stdout.splitlines()[-1])
    parts = predicted_bytes(shape, tokens, options.workspace_mb * MIB)
    expected = phases["imports"]["now"] + sum(parts.values())
    print(f"\nPython, {tokens} tokens, rank {RANK}, gradient checkpointing; MiB")
    for name, size in {"imports": phases["imports"]["now"], **parts}.items():
        print(f"  {name:38} {size / MIB:8.1f}")
    measured = phases["step 3"]["peak"]
    print(f"  {'predicted':38} {expected / MIB:8.1f}")
    print(
        f"  {'measured high-water mark':38} {measured / MIB:8.1f}   {measured / 1e9:.2f} GB, {measured / expected:.3f} of it"
    )
    for name, phase in phases.items():
        seconds = f"   {phase['seconds']:.1f} s" if "seconds" in phase else ""
        print(
            f"    after {name:32} {phase['now'] / MIB:8.1f}   high-water mark {phase['peak'] / MIB:8.1f}{seconds}"
        )
    return {"phases": phases, "predicted": expected, "parts": parts}


def _environment(options: argparse.Namespace) -> dict[str, str]:
    return dict(os.environ) if options.keep_freed else {**os.environ, **SYSTEM}


def memory_cpp(
    folder: Path, shape: dict[str, int], tokens: int, options: argparse.Namespace
) -> dict[str, object]:
    """Run the C++ fine-tuning program for three steps over random tokens, and print its memory."""
    count = 8 * tokens
    ids = torch.randint(shape["vocab_size"], (count,), generator=torch.Generator().manual_seed(0)).to(
        torch.uint16
    )
    with tempfile.TemporaryDirectory() as scratch:
        data, report = Path(scratch) / "tokens.bin", Path(scratch) / "report.json"
        # Write the header of shoestring.data.token_file: magic, vocabulary size, bytes per token, number of
        # tokens.
        data.write_bytes(
            struct.pack("<8sIIQ40x", b"shoetok\x01", shape["vocab_size"], 2, count) + ids.numpy().tobytes()
        )
        command = [
            options.memory_cpp,
            "--model",
            folder,
            "--data",
            data,
            "--out",
            Path(scratch) / "adapter",
            "--json",
            report,
        ]
        command += ["--steps", 3, "--batch-size", 1, "--seq-len", tokens, "--rank", RANK]
        command += ["--precision", "bf16", "--activations", "recompute", "--device", "cpu"]
        command += ["--workspace-mb", options.workspace_mb, "--threads", options.threads]
        words = [str(word) for word in command]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=_environment(options))
        found = json.loads(report.read_text())
    print("\nC++, the same; MiB")
    for name, key in [("libraries", "libtorch_bytes"), ("loaded, high-water mark", "loaded_bytes")]:
        print(f"  {name:38} {found[key] / MIB:8.1f}")
    print(
        f"  {'measured high-water mark':38} {found['peak_bytes'] / MIB:8.1f}   {found['peak_bytes'] / 1e9:.2f} GB"
    )
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory", action="store_true", help="measure a model's memory in Python, not layers' time"
    )
    parser.add_argument(
        "--memory-cpp", type=Path, metavar="PATH", help="and that of examples/cpp/finetune, built there"
    )
    parser.add_argument("--model", type=Path, help="folder of the model; it is written where there is none")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--workspace-mb", type=int, default=16, help="of the loss: bound on the logits at a time"
    )
    parser.add_argument("--keep-freed", action="store_true", help="leave glibc's malloc as it is")


def memory(options: argparse.Namespace) -> dict[str, object]:
    """Run the Python program, the C++ program or both, as the options say, with a model of random weights."""
    shape, found = SIZES["tiny" if options.quick else "1b"], {}
    tokens = 64 if options.quick else options.tokens
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch) / "model"
        if not (folder / "config.json").is_file():
            write_random_llama(folder, **shape)
        if options.memory:
            found["python"] = memory_python(folder, shape, tokens, options)
        if options.memory_cpp is not None:
            found["cpp"] = memory_cpp(folder, shape, tokens, options)
    return found


if __name__ == "__main__":
    folder, tokens, workspace_mb, vocab_size, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    measure(Path(folder), int(tokens), int(workspace_mb), int(vocab_size))
