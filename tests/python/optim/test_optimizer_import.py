"""Tests of loading state dicts of torch.optim.AdamW and bitsandbytes, and of exporting to torch.optim."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoestring.ops import dequantize_8bit, quantize_8bit
from shoestring.optim import AdamW

SIZES = [(20, 250), (1,), (4099,), (300,)]  # bitsandbytes quantises only tensors of 4,096 elements or more


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def gradients(params: list[Parameter], step: int) -> None:
    """Set gradients whose magnitudes spread over seven decades within every 256-element block.

    The second moments then spread over more decades than the values of an 8-bit quantisation map.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    for p in params:
        spread = (torch.arange(p.numel()) % 64 * 0.375 - 12).exp2().view(p.shape)
        p.grad = (torch.randn(p.shape, generator=generator) * spread * 1e-3).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        gradients(params, step)
        optimizer.step()


def twins(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


def values(entry: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}_scale" not in entry:
        return entry[name].clone()
    return dequantize_8bit(entry[name], entry[f"{name}_scale"], signed=name == "exp_avg")


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_torch_state(state: str, dtype: torch.dtype) -> None:
    theirs = parameters(dtype)
    b = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1)
    train(b, theirs, range(3))
    ours = twins(theirs)
    a = AdamW(ours, state_format=state, min_quantize_size=257, maximize=True)
    before = copy.deepcopy(b.state_dict())
    a.load_state_dict(b.state_dict())
    group = a.param_groups[0]
    assert (group["lr"], group["betas"], group["state_format"], group["maximize"]) == (
        3e-3,
        (0.8, 0.95),
        state,
        False,
    )
    assert "fused" not in group and "amsgrad" not in group
    for p, q in zip(ours, theirs, strict=True):
        entry, other = a.state[p], b.state[q]
        assert entry["step"] == 3 and other["exp_avg"].dtype == dtype
        for name in ("exp_avg", "exp_avg_sq"):
            if state == "8bit" and p.numel() >= 257:
                codes, scale = quantize_8bit(other[name].float(), signed=name == "exp_avg")
                assert torch.equal(entry[name], codes) and torch.equal(entry[f"{name}_scale"], scale)
            else:
                assert torch.equal(entry[name], other[name].float())

    # State in fp32 is loaded and exported without loss, so further steps agree.
    if state == "fp32" and dtype == torch.float32:
        train(a, ours, range(3, 6))
        train(b, theirs, range(3, 6))
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-7)
    b.load_state_dict(before)


@pytest.mark.device
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_back_to_torch(state: str) -> None:
    """torch.optim.AdamW loads torch_state_dict() of shoestring's AdamW and then takes the same step.

    The steps agree for 8-bit state too, since moments are quantised after a step and not before it.
    """
    ours = parameters()
    a = AdamW(ours, lr=3e-3, state_format=state, weight_decay=0.1)
    train(a, ours, range(3))
    theirs = twins(ours)
    b = torch.optim.AdamW(theirs)
    b.load_state_dict(a.torch_state_dict())
    train(a, ours, range(3, 4))
    train(b, theirs, range(3, 4))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-7)
        assert b.state[q]["step"] == 4 and b.param_groups[0]["decoupled_weight_decay"]


def bitsandbytes_state(params: list[Parameter], kind: str = "AdamW8bit", **options: Any) -> dict[str, Any]:
    bnb = pytest.importorskip("bitsandbytes")
    optimizer = getattr(bnb.optim, kind)(params, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, **options)
    train(optimizer, params, range(4))
    saved = optimizer.state_dict()
    # Make the codes those of bitsandbytes' GPU kernel, which gives the smallest second moments code 0 (the
    # value zero). The CPU kernel gives them code 7.
    for entry in saved["state"].values():
        tensors = entry["__bnb_optimizer_quant_state__"]
        if tensors["state2"].dtype == torch.uint8:
            assert (tensors["state2"] == 7).sum() > 100
            tensors["state2"].masked_fill_(tensors["state2"] == 7, 0)
    return saved


def plain_moments(entry: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the fp32 moments of one parameter from bitsandbytes' state, dequantised in plain PyTorch.

    If bitsandbytes rounded a second moment to zero, it gets the smallest nonzero value of the quantisation
    map.
    """
    tensors = entry["__bnb_optimizer_quant_state__"]
    moments = [tensors[f"state{i}"] for i in (1, 2)]
    if moments[0].dtype == torch.float32:
        return moments[0], moments[1]
    m, v = (
        tensors[f"qmap{i}"][codes.int()]
        * tensors[f"absmax{i}"].repeat_interleave(256)[: codes.numel()].view(codes.shape)
        for i, codes in enumerate(moments, 1)
    )
    smallest = tensors["absmax2"].repeat_interleave(256)[: v.numel()].view(v.shape) * tensors["qmap2"][1]
    return m, torch.where((v == 0) & (m != 0), smallest, v)


@pytest.mark.parametrize("kind", ["AdamW8bit", "Adam8bit"])
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_bitsandbytes_state(state: str, kind: str) -> None:
    theirs = parameters()
    saved = bitsandbytes_state(theirs, kind)
    ours, exact = twins(theirs), twins(theirs)
    a = AdamW(ours, state_format=state)
    a.load_state_dict(saved)
    for i, p in enumerate(ours):
        tensors, entry = saved["state"][i]["__bnb_optimizer_quant_state__"], a.state[p]
        m, v = plain_moments(saved["state"][i])
        assert entry["step"] == 4
        # 8-bit codes of bitsandbytes are loaded unchanged.
        if state == "8bit" and tensors["state1"].dtype == torch.uint8:
            assert torch.equal(entry["exp_avg"], tensors["state1"])
            assert torch.equal(entry["exp_avg_scale"], tensors["absmax1"])
            assert torch.equal(entry["exp_avg_sq_scale"], tensors["absmax2"])
            other = entry["exp_avg_sq"] != tensors["state2"]
            assert other.any() and (other == ((tensors["state2"] == 0) & (m != 0))).all()
            assert (entry["exp_avg_sq"][other] == 1).all()
        elif state == "8bit":
            assert torch.equal(entry["exp_avg_sq"], quantize_8bit(v, signed=False)[0])
        else:
            torch.testing.assert_close(entry["exp_avg"], m, rtol=1e-5, atol=0)
            torch.testing.assert_close(entry["exp_avg_sq"], v, rtol=1e-5, atol=0)

    # torch.optim.AdamW, started from the dequantised moments, must take the same step as shoestring's AdamW.
    b = torch.optim.AdamW(exact, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1)
    entries = {
        i: {"step": torch.tensor(4.0)}
        | {name: values(a.state[p], name) for name in ("exp_avg", "exp_avg_sq")}
        for i, p in enumerate(ours)
    }
    b.load_state_dict({"state": entries, "param_groups": b.state_dict()["param_groups"]})
    train(a, ours, range(4, 5))
    train(b, exact, range(4, 5))
    for p, q, r in zip(ours, exact, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-7)
        # No weight moves far from its value in the bitsandbytes run. Second moments of zero would move
        # weights by 4,000 times the learning rate.
        assert (p - r).detach().abs().max() < 10 * 3e-3


def test_another_map_is_quantised_again() -> None:
    saved = bitsandbytes_state(theirs := parameters())
    tensors = saved["state"][2]["__bnb_optimizer_quant_state__"]
    tensors["qmap1"] = tensors["qmap1"] ** 3
    m, _ = plain_moments(saved["state"][2])
    a = AdamW(ours := twins(theirs))
    a.load_state_dict(saved)
    codes, scale = quantize_8bit(m, signed=True)
    assert torch.equal(a.state[ours[2]]["exp_avg"], codes) and torch.equal(
        a.state[ours[2]]["exp_avg_scale"], scale
    )
    assert not torch.equal(codes, tensors["state1"])


def test_our_state_without_a_version() -> None:
    """shoestring's state dicts load without format_version, which distributed checkpoints do not keep."""
    params = parameters()
    a = AdamW(params, min_quantize_size=257)
    train(a, params, range(2))
    saved = {key: value for key, value in a.state_dict().items() if key != "format_version"}
    b = AdamW(other := twins(params))
    b.load_state_dict(saved)
    train(a, params, range(2, 4))
    train(b, other, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))


def torch_state(
    params: list[Parameter], optimizer: type = torch.optim.AdamW, **options: Any
) -> dict[str, Any]:
    other = optimizer(params, **options)
    train(other, params, range(2))
    return copy.deepcopy(other.state_dict())


def changed(state: dict[str, Any], change: Any) -> dict[str, Any]:
    change(state["state"][0].get("__bnb_optimizer_quant_state__", state["state"][0]))
    return state


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (
            lambda p: torch.nn.Linear(2, 2).state_dict(),
            "expected an optimizer's state dict, received no 'state'",
        ),
        (lambda p: torch_state(p, amsgrad=True), "amsgrad: expected False, received True"),
        (
            lambda p: torch_state(p, torch.optim.Adam, weight_decay=0.1),
            "expected decoupled weight decay, received 0.1 as L2",
        ),
        (
            lambda p: torch_state(p, torch.optim.SGD, lr=1),
            "expected groups of the same rule, .* without betas, eps",
        ),
        (
            lambda p: torch_state(p[::-1]),
            "exp_avg: expected the parameter's shape, \\(20, 250\\), received \\(300,\\)",
        ),
        (lambda p: torch_state(p[:2]), "doesn't match the size"),
        (
            lambda p: changed(torch_state(p), lambda e: e.pop("step")),
            "expected the entries \\['step', 'exp_avg', ",
        ),
        (lambda p: changed(torch_state(p), lambda e: e.update(extra=1)), "received .*'extra'"),
        (
            lambda p: changed(bitsandbytes_state(p), lambda e: e.pop("absmax2")),
            "absmax2: expected .*received none",
        ),
        (
            lambda p: changed(bitsandbytes_state(p), lambda e: e.update(absmax1=torch.zeros(3))),
            "absmax1: expected \\(20,\\) \\(blocks of 256 elements\\), received \\(3,\\)",
        ),
        (
            lambda p: changed(bitsandbytes_state(p), lambda e: e.pop("state2")),
            "expected the entries .*'state2'",
        ),
        (lambda p: changed(bitsandbytes_state(p), lambda e: e.update(state1=3)), "state1: .*received 3"),
    ],
)
def test_a_refused_import_changes_nothing(foreign: Any, message: str) -> None:
    params = parameters()
    a = AdamW(params, min_quantize_size=257)
    train(a, params, range(1))
    before = copy.deepcopy(a.state_dict())
    bad = foreign(parameters())
    with pytest.raises(ValueError, match=message):
        a.load_state_dict(bad)
    after = a.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i][k], v) for i, e in before["state"].items() for k, v in e.items())
