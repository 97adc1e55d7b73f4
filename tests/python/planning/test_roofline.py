"""Floating-point operations and bytes of operators against counts by hand, and the modules to which they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import shoestring
from shoestring import lora
from shoestring.planning.roofline import ModuleTime, roofline
from tiny_decoder import build_decoder

H200 = shoestring.hardware_profile("nvidia-h200")


def machine(flops: float = 1000.0, bytes_per_second: float = 1e30) -> shoestring.Machine:
    """Return a machine with the same rate of products for all dtypes but fp16."""
    rates = dict.fromkeys(H200.gemm_flops, flops) | {"fp16": None}
    reasons = {name: reason for name, reason in H200.not_measured.items() if name != "gemm_flops.tf32"}
    return replace(H200, gemm_flops=rates, copy_bytes_per_second=bytes_per_second, not_measured=reasons)


class Calls(nn.Module):
    """A model of one call; its parameters are the arguments."""

    def __init__(self, call: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.call = call
        self.arguments = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self) -> Any:
        return self.call(*self.arguments)


def work_of(call: Callable[..., Any], *shapes: tuple[int, ...]) -> ModuleTime:
    return roofline(Calls(call, list(shapes)), [], machine())[""]


def frozen(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes a weight as its second argument and does not train it."""
    return lambda x, weight, *rest: call(x, weight.detach(), *rest)


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    return shoestring.linear_cross_entropy(
        hidden, weight, torch.zeros(6, dtype=torch.int64, device=hidden.device)
    )


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return shoestring.grouped_linear(x, weight, torch.tensor([0, 1, 1, 4, 6], device=x.device))


def experts(x: Tensor, gate_up: Tensor, down: Tensor, *of_gate_up: Tensor) -> Tensor:
    index = torch.zeros(6, 2, dtype=torch.int64, device=x.device)
    weight = torch.ones(6, 2, device=x.device)
    lora = shoestring.ExpertLora(*of_gate_up) if of_gate_up else None
    return shoestring.moe_experts(x, index, weight, gate_up, down, lora=lora)


def quantized(x: Tensor, packed: Tensor, absmax: Tensor) -> Tensor:
    codes = packed.detach().to(torch.uint8)
    return torch.ops.shoestring.quantized_linear(x, codes, absmax.detach(), out_features=32)


def packed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.zeros(3, dtype=torch.int32, device=q.device)
    return shoestring.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)


def lora_group(x: Tensor, first: Tensor, second: Tensor, lora_A: Tensor, lora_B: Tensor) -> Tensor:
    layers = [
        shoestring.ops.LoraWeight(first.detach(), lora_A, lora_B),
        shoestring.ops.LoraWeight(second.detach()),
    ]
    return torch.cat(shoestring.lora_linear_group(x, layers), dim=-1)


X, W = (6, 8), (5, 8)  # 6 tokens, 8 features, 5 features of the output
QKV = (
    (2, 3, 4, 16),
    (2, 3, 4, 16),
    (2, 3, 4, 16),
)  # batch 2, 3 heads, 4 tokens, 16 features: 6 matrices of scores
# The call, the shapes of its arguments, and the products of its forward and of its backward as numbers of
# multiplications.
COUNTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, int]] = {
    "F.linear": (F.linear, (X, W), 6 * 8 * 5, 2 * 6 * 8 * 5),
    "F.linear, frozen": (frozen(F.linear), (X, W), 6 * 8 * 5, 6 * 8 * 5),
    "linear": (shoestring.linear, (X, W), 6 * 8 * 5, 2 * 6 * 8 * 5),
    "linear_group": (
        lambda x, a, b: torch.cat(shoestring.linear_group(x, [a, b]), -1),
        (X, W, (3, 8)),
        6 * 8 * (5 + 3),
        2 * 6 * 8 * (5 + 3),
    ),
    # All 4 x 4 pairs of tokens: two products forward; backward computes one of them again, and four others.
    "attention": (shoestring.attention, QKV, 6 * 16 * 2 * 16, 6 * 16 * 5 * 16),
    # 1 + 2 + 3 + 4 pairs
    "attention, causal": (
        lambda *qkv: shoestring.attention(*qkv, causal=True),
        QKV,
        6 * 10 * 2 * 16,
        6 * 10 * 5 * 16,
    ),
    # 1 + 2 + 2 + 2 pairs
    "attention, window": (
        lambda *qkv: shoestring.attention(*qkv, causal=True, window_size=(1, -1)),
        QKV,
        6 * 7 * 2 * 16,
        6 * 7 * 5 * 16,
    ),
    # 3 + 4 + 4 + 3 pairs in a window of 2 tokens to the left and 2 to the right, less the one that is too far
    "attention, two sides": (
        lambda *qkv: shoestring.attention(*qkv, window_size=(2, 2)),
        QKV,
        6 * 14 * 2 * 16,
        6 * 14 * 5 * 16,
    ),
    "attention, packed": (
        packed_attention,
        ((7, 3, 16), (7, 3, 16), (7, 3, 16)),
        3 * 49 * 2 * 16,
        3 * 49 * 5 * 16,
    ),
    "F.scaled_dot_product_attention": (
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True),
        QKV,
        6 * 10 * 2 * 16,
        6 * 10 * 5 * 16,
    ),
    # Logits, and both gradients, which forward computes as well.
    "linear_cross_entropy": (head, (X, W), 3 * 6 * 8 * 5, 0),
    "linear_cross_entropy, frozen": (frozen(head), (X, W), 2 * 6 * 8 * 5, 0),
    "linear_distillation": (
        lambda x, w, teacher, head: shoestring.linear_distillation(x, w, teacher.detach(), head.detach()),
        (X, W, (6, 10), (5, 10)),
        3 * 6 * 8 * 5 + 6 * 10 * 5,
        0,
    ),
    # 32 x 64 elements in 4 bits
    "quantized_linear": (quantized, ((6, 64), (1024, 1), (32,)), 6 * 64 * 32, 6 * 64 * 32),
    "lora_linear": (
        frozen(shoestring.lora_linear),
        (X, W, (2, 8), (5, 2)),
        6 * (8 * 5 + 2 * (8 + 5)),
        6 * (8 * 5 + 2 * 2 * (8 + 5)),
    ),
    "grouped_linear": (grouped, (X, (4, 5, 8)), 6 * 8 * 5, 2 * 6 * 8 * 5),
    # 6 tokens with 2 of 4 experts: matrices of 10 x 8 and 8 x 5
    "moe_experts": (experts, (X, (4, 10, 8), (4, 8, 5)), 12 * 120, 2 * 12 * 120),
    "frozen moe_experts with LoRA": (
        lambda x, up, down, *lora: experts(x, up.detach(), down.detach(), *lora),
        (X, (4, 10, 8), (4, 8, 5), (4, 3, 8), (4, 10, 3)),
        12 * (120 + 3 * 18),
        12 * (120 + 2 * 3 * 18 + 3 * 8),
    ),
    "lora_linear_group": (
        lora_group,
        (X, W, (3, 8), (2, 8), (5, 2)),
        6 * (8 * (5 + 3) + 2 * (8 + 5)),
        6 * (8 * (5 + 3) + 2 * 2 * (8 + 5)),
    ),
}  # fmt: skip


@pytest.mark.first
@pytest.mark.parametrize("name", COUNTS)
def test_operations_against_counts_by_hand(name: str) -> None:
    call, shapes, forward, backward = COUNTS[name]
    work = work_of(call, *shapes)
    assert (work.forward_flops, work.backward_flops) == (2 * forward, 2 * backward)


@torch.no_grad()
def test_operations_without_gradients() -> None:
    """Operators that save nothing for backward are called by other names."""
    for name, (call, shapes, forward, _) in COUNTS.items():
        model = Calls(call, list(shapes)).requires_grad_(False)
        expected = 6 * 8 * 5 if name.startswith("linear_cross") else forward
        expected = 6 * 8 * 5 + 6 * 10 * 5 if name.startswith("linear_dist") else expected
        assert roofline(model, [], machine())[""].forward_flops == 2 * expected, name


def test_time_is_the_longer_one_of_operations_and_bytes() -> None:
    # 6 x 8, 5 x 8 and 6 x 5 numbers of 4 bytes, and the bias
    layer, x = nn.Linear(8, 5), torch.zeros(6, 8)
    work = roofline(layer, x, machine())[""]
    assert work.forward_flops == 480 and work.forward_seconds == pytest.approx(480 / 1000)
    bytes = 4 * (6 * 8 + 5 * 8 + 6 * 5 + 5)
    slow = roofline(layer, [x], machine(flops=1e29, bytes_per_second=100.0))[""]
    # The sum that is the loss reads the output, and writes one number.
    assert slow.forward_bytes == bytes + 4 * (6 * 5 + 1)
    assert slow.forward_seconds == pytest.approx(slow.forward_bytes / 100)
    half = roofline(layer.to(torch.bfloat16), x.bfloat16(), machine())[""]
    assert half.forward_bytes == slow.forward_bytes / 2 and half.forward_flops == 480


def test_views_and_expanded_tensors_have_no_bytes_of_their_own() -> None:
    plain = work_of(torch.neg, (8, 6))
    views = work_of(lambda x: x.view(2, 4, 6).transpose(0, 1)[1:].expand(5, -1, -1, -1).detach(), (8, 6))
    assert plain.forward_bytes == 4 * (2 * 48 + 48 + 1)
    assert views.forward_bytes == 4 * (3 * 2 * 6 + 1)  # those of the sum
    indices = torch.zeros(3, dtype=torch.int64, device="meta")
    rows = work_of(lambda w: F.embedding(indices, w), (1000, 4))
    assert rows.forward_bytes == 4 * (2 * 3 * 4 + 3 * 4 + 1)  # three rows, not the whole table


def test_operations_are_those_that_pytorch_counts() -> None:
    model = build_decoder(attn_implementation="eager")
    ids = torch.zeros(2, 16, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids, labels=ids).loss.backward()
    work = roofline(model, {"input_ids": ids, "labels": ids}, machine())[""]
    assert work.forward_flops + work.backward_flops == counter.get_total_flops()


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_modules_have_their_share(patched: bool) -> None:
    model = build_decoder()
    if patched:
        shoestring.patch(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    times = roofline(model, {"input_ids": ids, "labels": ids}, machine())
    assert set(times) == {name for name, _ in model.named_modules()}
    layers = [times[f"model.layers.{i}"] for i in range(2)]
    assert (layers[0].forward_flops, layers[0].backward_flops) == (
        layers[1].forward_flops,
        layers[1].backward_flops,
    )
    # q and o of 64 x 64, k and v of 32 x 64, three matrices of 64 x 96; 136 pairs of tokens in 4 heads of 16 features
    weights, pairs = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96, 2 * 4 * 136
    assert layers[0].forward_flops == 2 * (32 * weights + pairs * 2 * 16)
    assert layers[0].backward_flops == 2 * (2 * 32 * weights + pairs * 5 * 16)
    inside = [times["model.layers.0.self_attn"], times["model.layers.0.mlp"]]
    assert sum(each.forward_flops for each in inside) == layers[0].forward_flops
    assert sum(each.backward_flops for each in inside) == layers[0].backward_flops
    assert times[""].forward_seconds > sum(each.forward_seconds for each in layers) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_on_the_meta_device_has_the_same_time() -> None:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    here = build_decoder()
    with torch.device("meta"):
        there = build_decoder()
    batch = {"input_ids": ids, "labels": ids}
    assert roofline(here, batch, H200) == roofline(there, batch, H200)


def test_backward_includes_what_it_computes_again() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
    x = torch.zeros(6, 8, requires_grad=True)
    plain = roofline(model, x, machine())
    report = shoestring.checkpoint_model(model, ["0", "1"])
    again = roofline(model, x, machine())
    report.undo()
    for name in ("0", "1", "1.0"):
        assert again[name].forward_flops == plain[name].forward_flops > 0
        # The result of the last layer in a block is not needed again.
        more = again[name].backward_flops - plain[name].backward_flops
        assert more in (plain[name].forward_flops, plain[name].forward_flops // 2), name


def test_adapters_of_a_quantised_model() -> None:
    model = lora.apply(build_decoder(), rank=4, alpha=8, target_modules="all-linear", quantize="nf4")
    ids = torch.zeros(2, 16, dtype=torch.int64)
    layer = roofline(model, {"input_ids": ids, "labels": ids}, machine())["model.layers.1"]
    weights, pairs = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96, 2 * 4 * 136
    adapters = 4 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (64 + 96))
    assert layer.forward_flops == 2 * (32 * (weights + adapters) + pairs * 2 * 16)
    assert layer.backward_flops == 2 * (32 * (weights + 2 * adapters) + pairs * 5 * 16)


def test_precision_chooses_the_rate_of_fp32_tensors() -> None:
    layer, x = nn.Linear(4096, 4096, device="meta"), torch.zeros(1024, 4096)
    seconds = {each: roofline(layer, x, H200, each)[""].forward_seconds for each in ("fp32", "bf16")}
    assert seconds["fp32"] > 5 * seconds["bf16"]
    flops = 2 * 1024 * 4096 * 4096
    assert seconds["fp32"] == pytest.approx(flops / H200.gemm_flops["fp32"], rel=0.01)


def test_refuses_what_it_cannot_predict() -> None:
    layer, x = nn.Linear(8, 8), torch.zeros(2, 8)
    with pytest.raises(
        ValueError, match=r"gemm_flops.fp16 of NVIDIA H200, received None: the results of this GPU"
    ):
        roofline(layer, x, H200, "fp16")
    with pytest.raises(ValueError, match="precision: expected one of"):
        roofline(layer, x, H200, "fp8")
    with pytest.raises(ValueError, match=r"expected products in fp32, bf16 or fp16, received torch.float64"):
        roofline(layer.double(), x.double(), H200)
    with pytest.raises(ValueError, match="expected an output with a tensor"):
        roofline(Calls(lambda: None, []), [], H200)
    with pytest.raises(TypeError, match=r"roofline: model: expected a torch.nn.Module"):
        roofline("model", x, H200)  # type: ignore[arg-type]
    assert all(p.grad is None for p in layer.parameters())
