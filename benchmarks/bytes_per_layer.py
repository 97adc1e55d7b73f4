"""Count the bytes that the operators of one decoder layer read and write in a training step.

A layer's bytes are the difference between a Llama of two layers and one of one layer. Each operator counts the
bytes of its input and output tensors once. Bytes inside an operator, such as packed operands of a product, do
not count, and neither do views. "least" counts the operands and results of the matrix products and of
attention, if everything between them were computed while operands are read and results are written.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shoestring
from benchmarks.step.where import group
from shoestring.integrations.transformers.products import Products
from shoestring.integrations.transformers.projections import fuse

GROUPS = ("products", "attention", "norms, activations", "copies, casts", "element by element", "rest")
WAYS = ("eager", "patched", "with linear layers")
# Arguments of these operators are written, but not read.
OVERWRITES = ("copy_", "fill_", "zero_")


class CountBytes(TorchDispatchMode):
    """Sum the bytes of the inputs and outputs of each operator, by the names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.replace("aten::", "")
        given = _tensors((args, kwargs))
        made = _tensors(out)
        changed = [t for t, a in zip(args, func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        views = not changed and made and all(any(_shares(t, g) for g in given) for t in made)
        if views or name.startswith(("empty", "new_empty")):
            return out
        read = given[1:] if name in OVERWRITES else given
        written = _tensors(changed) if changed else made
        self.bytes[func._schema.name] += sum(map(_bytes, read)) + sum(map(_bytes, written))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _bytes(t: Tensor) -> int:
    """Return the bytes of a tensor. A dimension over which it is broadcast counts once."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride != 0 or size == 0 else 1
    return count * t.element_size()


def step_bytes(model: nn.Module, ids: Tensor, autocast: bool) -> dict[str, int]:
    """Return the bytes of the forward and backward of a model, by operator."""
    with CountBytes() as count:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
    return count.bytes


def layer_bytes(make: Callable[[int], nn.Module], ids: Tensor, autocast: bool) -> dict[str, dict[str, int]]:
    """Return the bytes of one layer by group, and within a group by operator."""
    one, two = (step_bytes(make(layers), ids, autocast) for layers in (1, 2))
    found: dict[str, dict[str, int]] = {name: {} for name in GROUPS}
    for operator in two:
        bytes = two[operator] - one.get(operator, 0)
        if bytes > 0:
            key = group(operator)
            found[key if key in found else "rest"][operator] = bytes
    return found


def least(
    tokens: int, width: int, middle: int, activation: int, residual: int = 4, weight: int = 4
) -> dict[str, int]:
    """Return the least bytes of the products and of attention.

    Args:
        tokens, width, middle: tokens of a batch, features of a layer and of its MLP.
        activation, residual, weight: bytes of an element of activations, of the residual stream and of weights.
    """
    x, h = tokens * width, tokens * middle
    square, tall = width * width * weight, width * middle * weight
    forward = [
        x * residual + 3 * square + 3 * x * activation,  # query, key and value
        x * activation + square + 2 * x * residual,  # output of attention, with the residual sum
        x * residual + 2 * tall + 2 * h * activation,  # gate and up
        2 * h * activation + tall + 2 * x * residual,  # down, with the residual sum
    ]
    # The two gradients of a linear layer are one operator, as in shoestring.
    backward = [
        x * residual + 2 * tall + 4 * h * activation,  # down, with the gradients of gate and up
        2 * h * activation + 4 * tall + 3 * x * residual,  # gate and up, with the residual sum
        x * residual + 2 * square + 2 * x * activation,  # output of attention
        3 * x * activation + 6 * square + 3 * x * residual,  # query, key and value, with the residual sum
    ]
    return {"products": sum(forward) + sum(backward), "attention": (4 + 8) * x * activation}


def make(layers: int, sizes: dict[str, int], way: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=layers, num_attention_heads=sizes["hidden_size"] // 64,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    if way != WAYS[0]:
        shoestring.patch(model, linear=False)
    if way == WAYS[2]:
        # by this package's products, whatever a measurement would choose
        fuse(model, products=Products(lambda *_: ()))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--operators", action="store_true", help="also list the operators of each group")
    options = parser.parse_args()
    width, middle, rows, tokens = (64, 176, 2, 32) if options.quick else (512, 1408, 4, 512)
    sizes = {"hidden_size": width, "intermediate_size": middle, "vocab_size": 512}
    ids = torch.randint(512, (rows, tokens), generator=torch.Generator().manual_seed(0))
    print(f"one decoder layer of width {width}, MLP {middle}, {rows} x {tokens} tokens, MB per step")
    for autocast in (False, True):
        found = {
            way: layer_bytes(lambda n, way=way: make(n, sizes, way), ids, autocast)  # type: ignore[misc]
            for way in WAYS
        }
        floor = least(rows * tokens, width, middle, 2 if autocast else 4)
        print(
            f"\n{'bf16 autocast' if autocast else 'fp32':22}"
            + "".join(f"{name:>20}" for name in (*found, "least"))
        )
        for key in (*GROUPS, "all"):
            totals = [sum(sum(f[g].values()) for g in GROUPS if key in (g, "all")) for f in found.values()]
            totals.append(sum(floor.values()) if key == "all" else floor.get(key, 0))
            print(f"{key:22}" + "".join(f"{total / 1e6:20.1f}" for total in totals))
        if options.operators:
            for name, groups in found.items():
                for key, operators in groups.items():
                    listed = sorted(operators.items(), key=lambda item: -item[1])
                    print(f"  {name}, {key}: " + ", ".join(f"{o} {b / 1e6:.1f}" for o, b in listed))


if __name__ == "__main__":
    main()
