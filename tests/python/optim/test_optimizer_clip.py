"""Tests of max_grad_norm (clipping within the step) and of min_quantize_size (small parameters in fp32)."""

import copy
import math

import pytest
import torch
from torch.nn import Parameter

from shoestring.optim import AdamW

SIZES = [(3, 100), (1,), (257,), (0,), (40,)]


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def gradients(params: list[Parameter], step: int, size: float = 1.0) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)
    params[4].grad = None


def pair(dtype: torch.dtype = torch.float32, **options: object) -> tuple[AdamW, AdamW, list, list]:
    ours, plain = parameters(dtype), parameters(dtype)
    a, b = (
        AdamW([{"params": p[:2], "lr": 3e-3}, {"params": p[2:]}], **options, max_grad_norm=clip)
        for p, clip in ((ours, 2.0), (plain, None))
    )
    return a, b, ours, plain


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-2], ids=["clipped", "not clipped"])
def test_clip_is_that_of_torch(size: float, dtype: torch.dtype) -> None:
    a, b, ours, plain = pair(dtype, state_format="fp32")
    for step in range(4):
        gradients(ours, step, size)
        gradients(plain, step, size)
        before = [p.grad.clone() for p in ours[:4]]
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in plain[:4]])
        a.step()
        # For bf16 gradients, PyTorch's clip_grad_norm_ rounds the norm to bf16, so its result is less
        # accurate.
        torch.nn.utils.clip_grad_norm_(plain, 2.0)
        b.step()
        torch.testing.assert_close(a.grad_norm, norm, rtol=1e-6, atol=0)
        assert (norm > 2) == (size == 1) and b.grad_norm is None
        assert all(torch.equal(p.grad, g) for p, g in zip(ours[:4], before, strict=True))
        for p, q in zip(ours, plain, strict=True):
            tolerance = (
                {"rtol": 1e-5, "atol": 2e-7} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}
            )
            torch.testing.assert_close(p, q, **tolerance)
        for p, q in zip(ours[:4], plain[:4], strict=True):
            rtol = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                a.state[p]["exp_avg"], b.state[q]["exp_avg"], rtol=rtol, atol=rtol / 10
            )


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_the_unscaled_norm_counts(unscale: bool, dtype: torch.dtype) -> None:
    """With a GradScaler, clipping and grad_norm use the norm of the unscaled gradients.

    In the test, the norm of the scaled gradients exceeds the range of fp16.
    """
    ours, plain = parameters(dtype), parameters(dtype)
    a, b = AdamW(ours, max_grad_norm=0.5), AdamW(plain, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**14, growth_interval=100)
    scaler.scale(torch.ones(1))  # GradScaler creates its scale tensor in the first call of scale().
    for step in range(4):
        gradients(plain, step, size=0.25)
        for p, q in zip(ours, plain, strict=True):
            p.grad = None if q.grad is None else (q.grad.float() * scaler.get_scale()).to(dtype)
            if step == 2 and p.grad is not None:
                p.grad.fill_(torch.inf)
        # fp16 is left out, since GradScaler.unscale_ raises an error for fp16 gradients.
        if unscale and dtype == torch.float32:
            scaler.unscale_(a)
        scaler.step(a)
        scale = scaler.get_scale()
        scaler.update()
        if step == 2:
            assert scaler.get_scale() == scale / 2 and not a.grad_norm.isfinite()
        else:
            b.step()
            torch.testing.assert_close(a.grad_norm, b.grad_norm, rtol=1e-6, atol=0)
            assert math.isfinite(a.grad_norm) and a.grad_norm > 0.5
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_norms_are_as_in_torch(bad: float) -> None:
    a, b, ours, plain = pair()
    for params in (ours, plain):
        gradients(params, 0)
        params[0].grad[0, 0] = bad
    torch.nn.utils.clip_grad_norm_(plain, 2.0)
    a.step()
    b.step()
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)
    assert not a.grad_norm.isfinite() and ours[2].isfinite().all() == (bad == torch.inf)


@pytest.mark.device
def test_the_norm_can_be_had_alone_and_survives_copies() -> None:
    a, b, ours, plain = pair()
    a.max_grad_norm = torch.inf
    gradients(ours, 0)
    gradients(plain, 0)
    a.step()
    b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, plain, strict=True)) and a.grad_norm > 2
    assert copy.deepcopy(a).max_grad_norm == torch.inf
    for p in ours:
        p.grad = None
    a.step()
    assert a.grad_norm is None
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="AdamW: max_grad_norm: expected None or a number above 0"):
            AdamW(ours, max_grad_norm=wrong)


@pytest.mark.device
def test_small_parameters_keep_fp32_state() -> None:
    """Parameters with fewer than min_quantize_size elements have fp32 state, and the others 8-bit state.

    Loading a state dict restores min_quantize_size, and with it the format of each parameter's state.
    """
    ours, quantized, exact = parameters(), parameters(), parameters()
    a = AdamW(ours, min_quantize_size=257)
    b, c = AdamW(quantized), AdamW(exact, state_format="fp32")
    for step in range(3):
        for params in (ours, quantized, exact):
            gradients(params, step)
        for optimizer in (a, b, c):
            optimizer.step()
    for p, q, r in zip(ours, quantized, exact, strict=True):
        assert torch.equal(p, q if p.numel() >= 257 else r)
    assert ["exp_avg_scale" in a.state[p] for p in ours[:4]] == [True, False, True, False]
    storages = [t.untyped_storage() for entry in a.state.values() for t in entry.values()]
    sizes = {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}
    # The expected bytes are those of four blocks of 8-bit state, one block of fp32 state, and four step
    # counts.
    assert sum(sizes.values()) == (2 + 2) * 520 + 1 * 2048 + 4 * 4

    resumed = [Parameter(p.detach().clone()) for p in ours]
    other = AdamW(resumed)
    other.load_state_dict(copy.deepcopy(a.state_dict()))
    for step in range(3, 5):
        for params in (ours, resumed):
            gradients(params, step)
            # params[4], which is smaller than min_quantize_size, gets its first gradient after the state dict
            # was loaded.
            params[4].grad = torch.ones_like(params[4])
        a.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, resumed, strict=True))
    assert other.state[resumed[4]]["exp_avg"].dtype == torch.float32

    wrong = copy.deepcopy(a.state_dict())
    wrong["param_groups"][0]["min_quantize_size"] = 1000
    with pytest.raises(ValueError, match='state_format="fp32" expects the entries'):
        other.load_state_dict(wrong)
    with pytest.raises(
        ValueError, match="min_quantize_size: expected a whole number of at least 0, received -1"
    ):
        AdamW(ours, min_quantize_size=-1)
