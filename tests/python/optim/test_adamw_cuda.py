"""Tests of AdamW that need a GPU: large tensors, CUDA graphs, side streams, tensors on other devices."""

import copy

import pytest
import torch
from torch.nn import Parameter

from optimizer_rules import ADAMW
from shoestring.optim import AdamW

pytestmark = pytest.mark.device
adamw_ = torch.ops.shoestring.adamw_
GIB = 2**30


@pytest.fixture(autouse=True)
def gpu(backend: str) -> None:
    if backend != "cuda":
        pytest.skip("needs a GPU")


# Element counts. The second exceeds the range of 32-bit indices. Both end with a partly filled state block
# and a partly filled warp.
@pytest.mark.parametrize("size", [2**27 + 1033, 2**31 + 1033])
def test_full_size(size: int) -> None:
    """AdamW steps on a large tensor give the same bits as steps on copies of small parts of the tensor.

    The parts are pairs of 256-element blocks, spread over the tensor, and the last blocks. The test compares
    weights and 8-bit codes.
    """
    # The test needs 12 bytes per element: 2 for the weight, 2 for the gradient, 2.03 for the state, 2 for a
    # copy, and the rest for random numbers.
    if torch.cuda.mem_get_info()[0] < 12 * size + GIB:
        pytest.skip(f"needs {(12 * size + GIB) / GIB:.0f} GiB of free memory")
    param = torch.empty(size, dtype=torch.bfloat16).normal_()
    grad = torch.empty_like(param).normal_()
    starts = [*range(0, size - 512, size // 64 // 256 * 256), size // 256 * 256 - 256]
    samples = [(b, min(b + 512, size)) for b in starts]
    alone = [param[b:e].clone() for b, e in samples]
    arena = ADAMW.arenas([size], "8bit")
    for _ in range(2):
        adamw_([param], [grad], *arena, **ADAMW.hyper)
    parts = [grad[b:e].clone() for b, e in samples]
    small = ADAMW.arenas([p.numel() for p in alone], "8bit")
    for _ in range(2):
        adamw_(alone, parts, *small, **ADAMW.hyper)
    assert all(torch.equal(param[b:e], p) for (b, e), p in zip(samples, alone, strict=True))
    codes = torch.cat([arena[1][b : -(-e // 256) * 256] for b, e in samples])
    assert torch.equal(codes, small[1])


@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_graph_replays_are_steps(state: str) -> None:
    """A replayed CUDA graph of step() reads gradients, step counts, learning rate and found_inf anew."""
    sizes = [(64, 100), (1001,), (16, 8, 3, 3)]
    ours = [Parameter(torch.randn(s)) for s in sizes]
    # This parameter is not contiguous, so the optimizer steps a contiguous copy of it.
    ours[2].data = ours[2].data.contiguous(memory_format=torch.channels_last)
    for p in ours:
        p.grad = torch.randn_like(p)
    opt = AdamW(ours, lr=torch.tensor(1e-2), state_format=state)
    opt.found_inf = torch.zeros(())
    # The first step allocates the optimizer's state, which must exist before the graph is captured.
    opt.step()
    plain = [Parameter(p.detach().clone()) for p in ours]
    twin = AdamW(plain, lr=1e-2, state_format=state)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    for i in range(4):
        grads = [torch.randn_like(p) for p in ours]
        for p, q, g in zip(ours, plain, grads, strict=True):
            p.grad.copy_(g)
            q.grad = g
        rate = 2.0 ** -(5 + i)
        opt.param_groups[0]["lr"].fill_(rate)
        opt.found_inf.fill_(float(i == 2))
        graph.replay()
        twin.param_groups[0]["lr"] = rate
        if i != 2:
            twin.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, plain, strict=True))
        for a, b in zip(opt.state.values(), twin.state.values(), strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)


def test_nothing_waits() -> None:
    params = [Parameter(torch.randn(300, 4)), Parameter(torch.randn(4, 300).t())]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = AdamW(params, lr=torch.tensor(1e-2))
    opt.step()
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.zeros(())
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_stream_of_its_own() -> None:
    """An optimizer step on a side stream uses the gradient that earlier work on this stream has written."""
    stream = torch.cuda.Stream()
    p, plain = torch.zeros(1 << 20), torch.zeros(1 << 20)
    g = torch.zeros(1 << 20)
    a, b = ADAMW.arenas([p.numel()], "8bit"), ADAMW.arenas([p.numel()], "8bit")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        g.fill_(1)
        adamw_([p], [g], *a, **ADAMW.hyper)
    torch.cuda.current_stream().wait_stream(stream)
    adamw_([plain], [torch.ones(1 << 20)], *b, **ADAMW.hyper)
    assert torch.equal(p, plain)


def test_other_devices_are_refused() -> None:
    p, g = torch.zeros(20), torch.ones(20)
    far, state = torch.zeros(20, device="cpu"), ADAMW.arenas([20, 20], "8bit")
    with pytest.raises(
        RuntimeError,
        match="adamw_: params\\[1\\]: expected .* device of all parameters, cuda:0, received .* cpu",
    ):
        adamw_([p, far], [g, far], *state, **ADAMW.hyper)
    with pytest.raises(
        RuntimeError,
        match="adamw_: grads\\[1\\]: expected fp32, bf16 or fp16 on the parameter's device, cuda:0",
    ):
        adamw_([p, p.clone()], [g, far], *state, **ADAMW.hyper)
    with pytest.raises(
        RuntimeError, match="adamw_: exp_avg: expected the parameters' device, cuda:0, received cpu"
    ):
        adamw_([p, p.clone()], [g, g], state[0], state[1].cpu(), *state[2:], **ADAMW.hyper)
    with pytest.raises(
        RuntimeError, match="adamw_: found_inf: expected one fp32 number on the parameters' device"
    ):
        adamw_([p, p.clone()], [g, g], *state, **ADAMW.hyper, found_inf=torch.zeros((), device="cpu"))
    assert (p == 0).all() and (state[0] == 0).all()
