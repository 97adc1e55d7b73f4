"""Write a Hugging Face model directory of a Llama with random weights, for measurements at real sizes.

    python benchmarks/random_llama.py DIR --size 1b

The files are written tensor by tensor, so that the model may be larger than memory.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

SHARD = 512 * 2**20  # maximum number of bytes per shard; a model of 1 B parameters has several shards
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SIZES = {
    # The sizes of TinyLlama, which has 1.1 B parameters.
    "1b": {
        "hidden": 2048,
        "intermediate": 5632,
        "layers": 22,
        "heads": 32,
        "kv_heads": 4,
        "vocab_size": 32_000,
    },
    "tiny": {"hidden": 64, "intermediate": 176, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 512},
}

Shapes = dict[str, tuple[int, ...]]


def linear_shapes(shape: dict[str, int]) -> list[tuple[int, int]]:
    """Return (rows, columns) of each linear layer of a block: q, o, k, v, gate, up and down."""
    hidden, wide = shape["hidden"], shape["intermediate"]
    narrow = hidden // shape["heads"] * shape["kv_heads"]
    return [(hidden, hidden)] * 2 + [(narrow, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]


def write_random_llama(
    directory: Path,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab_size: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> None:
    """Write config.json, weight files of at most SHARD bytes each, and their index.

    Only one tensor is in memory at a time. Weights are normally distributed with standard deviation 0.02; the
    weights of norms are 1. The output layer has a weight of its own, not that of the embedding.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shapes = _shapes(hidden, intermediate, layers, heads, kv_heads, vocab_size)
    shards = list(_shards(shapes, dtype.itemsize))
    generator = torch.Generator().manual_seed(seed)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(directory / name, shard, dtype, generator)
        index |= dict.fromkeys(shard, name)
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    _write_json(directory / "config.json", config)


def _shapes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab_size: int
) -> Shapes:
    narrow = hidden // heads * kv_heads
    shapes: Shapes = {"model.embed_tokens.weight": (vocab_size, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (narrow, hidden),
            prefix + "self_attn.v_proj.weight": (narrow, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab_size, hidden)}


def _shards(shapes: Shapes, itemsize: int) -> Iterator[Shapes]:
    shard: Shapes = {}
    size = 0
    for name, shape in shapes.items():
        more = math.prod(shape) * itemsize
        if shard and size + more > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += more
    yield shard


def _write(path: Path, shapes: Shapes, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Write a safetensors file: its header, then each tensor as soon as its values are drawn."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            tensor = torch.empty(shape, dtype=dtype)
            tensor = tensor.fill_(1) if len(shape) == 1 else tensor.normal_(std=0.02, generator=generator)
            file.write(tensor.view(torch.uint8).numpy())


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a Llama-shaped model directory of random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_random_llama(
        options.directory, **SIZES[options.size], dtype=getattr(torch, options.dtype), seed=options.seed
    )


if __name__ == "__main__":
    main()
