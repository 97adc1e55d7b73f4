"""nn.Attention and nn.GatedMLP in C++ load the same weights, and compute the same outputs and gradients."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoestring
from build_folder import program

QWEN = {"num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "causal": True, "norm_eps": 1e-5}
ATTENTION: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "qwen3": (QWEN, ("cos", "sin")),
    "gemma": (
        QWEN | {"norm_offset": 1.0, "softcap": 3.0, "scale": 0.3, "left": 2},
        ("cos", "sin", "position_ids"),
    ),
    "gpt_oss": ({"bias": True, "out_bias": True, "sinks": True, "left": 3, "causal": True}, ("cos", "sin")),
    "neighbours": ({"interleaved": True, "rotary_dim": 8, "num_kv_heads": 1}, ("cos", "sin")),
    "normed": ({"qk_norm": True, "value_dim": 8}, ("bias", "alibi_slopes")),
    "cross": ({"source_features": 24, "num_kv_heads": 2}, ("source",)),
    "packed": ({"num_kv_heads": 2, "causal": True}, ("cu_seqlens_q", "cos", "sin")),
    "packed_cross": ({"qk_norm": True}, ("source", "cu_seqlens_q", "cu_seqlens_k")),
    "dropout": ({"dropout_p": 0.4}, ()),
}


def inputs_of(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return a dict of x, the upstream gradient, and the inputs in ``names``.

    x has 2 rows of 7 tokens, or packed sequences of 3 and 4 tokens. In cross-attention, keys and values come
    from 5 tokens of another sequence (``source``).
    """
    packed = "cu_seqlens_q" in names
    rows = () if packed else (2,)
    rotary = options.get("rotary_dim", options.get("head_dim", 16))
    angles = torch.rand(7, rotary // 2)
    every = {
        "source": torch.randn(*rows, 5, options.get("source_features", 64)),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "position_ids": torch.randperm(7)[None],
        "bias": torch.randn(1, 4, 7, 7),
        "alibi_slopes": torch.rand(4),
        "cu_seqlens_q": torch.tensor([0, 3, 7], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 1, 5], dtype=torch.int32),
    }
    inputs = {"x": torch.randn(*rows, 7, 64), "upstream": torch.randn(*rows, 7, 64)}
    return inputs | {name: every[name] for name in names}


def compare(
    kind: str, module: nn.Module, options: dict[str, Any], inputs: dict[str, Tensor], folder: Path
) -> None:
    """Run the C++ program layer_file; compare its output and gradients with those of the Python module."""
    for name, p in module.named_parameters():
        if name.endswith(("norm.weight", "sinks")):
            nn.init.normal_(p)
    files = [folder / f"{name}.safetensors" for name in ("weights", "inputs", "results")]
    save_file(module.state_dict(), files[0])
    save_file(inputs, files[1])
    text = ",".join(f"{key}:{value}" for key, value in options.items())
    done = subprocess.run([*program("layer_file"), kind, text, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs = load_file(files[2])
    x = inputs["x"].clone().requires_grad_()
    torch.manual_seed(7)
    y = module(x, **{name: t for name, t in inputs.items() if name not in ("x", "upstream")})
    y.backward(inputs["upstream"])
    ours = {"y": y.detach(), "grad.x": x.grad} | {
        f"grad.{name}": p.grad for name, p in module.named_parameters()
    }
    assert ours.keys() == theirs.keys()
    # PyTorch's matrix products may round differently if a tensor has a different alignment in memory.
    for name, t in ours.items():
        torch.testing.assert_close(
            t, theirs[name], rtol=1e-5, atol=5e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: str, tmp_path: Path) -> None:
    options, names = ATTENTION[case]
    sizes = {"features": 64, "num_heads": 4}
    here = {key: value for key, value in options.items() if key != "left"}
    if "left" in options:
        here["window_size"] = (options["left"], -1)
    module = shoestring.nn.Attention(**sizes, **here).train()
    compare("attention", module, sizes | options, inputs_of(options, names), tmp_path)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation: str, bias: bool, tmp_path: Path) -> None:
    options = {"features": 64, "hidden_features": 96, "activation": activation, "bias": bias}
    compare("mlp", shoestring.nn.GatedMLP(**options), options, inputs_of({}, ()), tmp_path)


def test_a_file_that_does_not_go_with_the_module(tmp_path: Path) -> None:
    """The C++ module refuses weights of a different width, and names the parameter and the expected shape."""
    path = tmp_path / "weights.safetensors"
    save_file(shoestring.nn.GatedMLP(64, 32).state_dict(), path)
    save_file(inputs_of({}, ()), tmp_path / "inputs.safetensors")
    command = [
        *program("layer_file"),
        "mlp",
        "features:64,hidden_features:96",
        path,
        tmp_path / "inputs.safetensors",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "proj.weight" in done.stderr and "[96, 64]" in done.stderr, done.stderr
