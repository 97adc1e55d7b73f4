"""AdamW where only a GPU can tell: full sizes, CUDA graphs, nothing that waits, tensors on other devices."""

import copy

import pytest
import torch
from torch.nn import Parameter

from optimizer_rules import ADAMW
from shoestring.ops import adamw_
from shoestring.optim import AdamW

pytestmark = pytest.mark.device
GIB = 2**30


@pytest.fixture(autouse=True)
def gpu(backend: str) -> None:
    if backend != "cuda":
        pytest.skip("needs a GPU")


# Past what 32 bits can count, too. The last block is partly filled, and so is its warp.
@pytest.mark.parametrize("size", [2**27 + 1033, 2**31 + 1033])
def test_full_size(size: int) -> None:
    """Pairs of blocks from all over the tensor, and the last two, against the same blocks alone."""
    if torch.cuda.mem_get_info()[0] < 12 * size + GIB:  # 2 + 2 + 2.03, a clone, and room for random numbers
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
    """Steps, learning rate and found_inf are read when the graph runs."""
    sizes = [(64, 100), (1001,), (16, 8, 3, 3)]
    ours = [Parameter(torch.randn(s)) for s in sizes]
    ours[2].data = ours[2].data.contiguous(memory_format=torch.channels_last)  # is stepped in a copy
    for p in ours:
        p.grad = torch.randn_like(p)
    opt = AdamW(ours, lr=torch.tensor(1e-2), state=state)
    opt.found_inf = torch.zeros(())
    opt.step()  # makes the state
    plain = [Parameter(p.detach().clone()) for p in ours]
    twin = AdamW(plain, lr=1e-2, state=state)
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
    """A step waits for what its stream has queued, and for nothing else."""
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
        RuntimeError, match="adamw_: params\\[1\\]: expected .* device of all, cuda:0, received .* cpu"
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
