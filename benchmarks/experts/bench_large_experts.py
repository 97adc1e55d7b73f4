"""Fine-tune the shape of Qwen3-30B-A3B with QLoRA on this machine, in memory and from a file.

The model has random weights in NF4 with double quantisation, and is written layer by layer, since its 16-bit form has
57 GiB. Each way has a process of its own, whose peak is VmHWM, imports included. Gradients are checkpointed, the step is
that of 8-bit AdamW, and the times are those of whole steps after the first.

    python -m benchmarks.experts.bench_large_experts --model DIR --disk DIR [--only memory] [--adapters all --rank 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import shoestring
from benchmarks.common import Report, arguments
from shoestring.core.process_memory import peak_bytes
from shoestring.files.safetensors_file import save_safetensors
from shoestring.quantization.nested_scales import groups_of
from shoestring.quantization.quantized_keys import write_keys
from shoestring.quantization.quantized_tensor import QuantizedTensor

GIB = 1 << 30
BLOCK = 64
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SMALL = {
    **LARGE,
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


def own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="folder of the model, written if it has no config.json; else a temporary one"
    )
    parser.add_argument("--disk", help="folder for the weights that are away; by default that of the model")
    parser.add_argument("--only", choices=["memory", "disk"], help="measure one way")
    parser.add_argument("--adapters", choices=["attention", "all"], default="attention")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--way", help=argparse.SUPPRESS)


def random_codes(shape: tuple[int, ...]) -> QuantizedTensor:
    """Return random NF4 codes with nested scales, of weights with a standard deviation of about 0.02."""
    count = 1
    for size in shape:
        count *= size
    blocks = count // BLOCK
    packed = torch.randint(256, (count // 2,), dtype=torch.uint8)
    absmax = torch.randint(96, 160, (blocks,), dtype=torch.uint8)
    values = torch.linspace(-1, 1, 256)
    nested = torch.cat([torch.tensor([0.05]), values, torch.full((groups_of(blocks),), 0.02)])
    return QuantizedTensor(
        packed, absmax, nested, shape=shape, dtype=torch.bfloat16, quant_type="nf4", block_size=BLOCK
    )


def write_model(folder: Path, fields: dict[str, Any]) -> None:
    """Write a model of random codes, a file for each layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**fields, dtype="bfloat16")
    config.quantization_config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    linear = {
        f"{n}.weight" for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"
    }
    layers: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in model.named_parameters():
        number = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        layers.setdefault(number, []).append((name, parameter.shape))
    files: dict[str, str] = {}
    for number, tensors in layers.items():
        found: dict[str, Any] = {}
        for name, shape in tensors:
            if name in linear or len(shape) == 3:
                write_keys(random_codes(tuple(shape)), found, name)
            else:
                is_norm = len(shape) == 1
                value = torch.ones(shape) if is_norm else torch.randn(shape) * 0.02
                found[name] = value.to(torch.bfloat16)
        file = f"model-{number}.safetensors"
        save_safetensors(folder / file, found, {"format": "pt"})
        files |= dict.fromkeys(found, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config.save_pretrained(folder)


def measure(options: argparse.Namespace) -> None:
    """Run some steps in this process, and print the figures as JSON."""
    began = time.perf_counter()
    place: dict[str, Any] = {} if options.way == "memory" else {"to": f"nvme:{options.disk}"}
    model: Any = shoestring.load_quantized(options.model, **place)
    loading = time.perf_counter() - began
    torch.manual_seed(0)
    experts = ["experts.gate_up_proj", "experts.down_proj"] if options.adapters == "all" else []
    shoestring.lora.apply(
        model,
        rank=options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=experts,
    )
    shoestring.patch(model.train(), logits=False)
    shoestring.checkpoint_model(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = shoestring.optim.AdamW(trained, lr=1e-4, state_format="8bit")
    tokens = torch.randint(model.config.vocab_size, (1, options.tokens))
    seconds, losses = [], []
    handle = shoestring.OffloadedWeights.of(model) if place else None
    for _ in range(options.steps):
        began, before = time.perf_counter(), 0 if handle is None else handle.statistics()["fetched"]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    read = 0 if handle is None else handle.statistics()["fetched"] - before
    print(
        json.dumps(
            {
                "peak": peak_bytes(),
                "loading": loading,
                "seconds": seconds,
                "losses": losses,
                "read": read,
                "trained": sum(p.numel() for p in trained),
                "experts": shoestring.count_experts(model)._asdict(),
            }
        )
    )


def main() -> None:
    options = arguments(__doc__ or "", more=own)
    if options.way:
        measure(options)
    elif options.model is None:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, Path(folder))
    else:
        compare(options, Path(options.model))


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Write the model if it is not there, and measure each way in a process of its own."""
    if not (folder / "config.json").exists():
        began = time.perf_counter()
        write_model(folder, SMALL if options.quick else LARGE)
        print(f"wrote {folder} in {time.perf_counter() - began:.0f} s")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    report = Report("large_experts", options)
    print(
        f"model {size / GIB:.2f} GiB, {options.tokens} tokens, adapters on {options.adapters}, rank {options.rank}"
    )
    figures = {}
    for way in ("memory", "disk") if options.only is None else (options.only,):
        places = ["--model", str(folder), "--disk", options.disk or str(folder), "--way", way]
        command = [sys.executable, "-m", "benchmarks.experts.bench_large_experts", *sys.argv[1:], *places]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures[way] = found = json.loads(result.stdout.splitlines()[-1])
        step = statistics.median(found["seconds"][1:] or found["seconds"])
        print(
            f"{way}: peak {found['peak'] / GIB:.2f} GiB, {options.tokens / step:.2f} tokens/s, {step:.1f} s a step, "
            f"{found['read'] / GIB:.1f} GiB read a step, loaded in {found['loading']:.0f} s, "
            f"{found['experts']['quantized']} experts quantised, {found['trained'] / 1e6:.1f} M trained, "
            f"losses {', '.join(f'{loss:.4f}' for loss in found['losses'])}"
        )
    report.data["large_experts"] = {"bytes": size, **figures}
    report.finish()


if __name__ == "__main__":
    main()
