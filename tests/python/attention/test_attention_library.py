"""Test which calls of shoestring.attention use PyTorch's operators, and that the results agree.

Without a GPU, PyTorch has no such operators. Tests with the emulator register stand-ins for the CPU.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from references.attention import attention_reference
from relative_error import relative_error
from shoestring import attention

pytestmark = pytest.mark.device

# the values of the C++ enum at::SDPBackend
CHOICES = {"cudnn": 3, "flash": 1, "math": 0, "efficient": 2, "error": -1}


class StandIns:
    """Stand-ins for PyTorch's attention operators that return the same shapes and strides as these.

    They check the arguments that they receive.
    """

    def __init__(self, choice: str) -> None:
        self.calls: list[str] = []
        self.choice = choice
        self.library = torch.library.Library("aten", "IMPL")
        for name, function in (
            ("_fused_sdp_choice", self.choose),
            ("_scaled_dot_product_cudnn_attention", self.cudnn),
            ("_scaled_dot_product_flash_attention", self.flash),
            ("_scaled_dot_product_cudnn_attention_backward", self.cudnn_backward),
            ("_scaled_dot_product_flash_attention_backward", self.flash_backward),
        ):
            self.library.impl(name, function, "CPU")

    def choose(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> int:
        assert mask is None and dropout == 0 and enable_gqa == (q.size(1) != k.size(1))
        self.calls.append("choose")
        return CHOICES[self.choice]

    @staticmethod
    def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = (
            scale * q.double() @ k.double().repeat_interleave(q.size(1) // k.size(1), 1).transpose(-1, -2)
        )
        if causal:
            assert q.size(2) == k.size(2)
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        scores = self.scores(q, k, causal, scale)
        out = scores.softmax(-1) @ v.double().repeat_interleave(q.size(1) // v.size(1), 1)
        return out.to(q.dtype), scores.logsumexp(-1).float()

    def cudnn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        compute_lse: bool,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert bias is None and compute_lse and dropout == 0 and not debug and scale is not None
        self.calls.append("cudnn")
        out, lse = self.forward(q, k, v, causal, scale)
        seed = torch.zeros((), dtype=torch.long)
        return (
            torch.empty_like(q).copy_(out),
            lse[..., None],
            None,
            None,
            q.size(2),
            k.size(2),
            seed,
            seed,
            None,
        )

    def flash(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert dropout == 0 and not debug and scale is not None
        self.calls.append("flash")
        out, lse = self.forward(q, k, v, causal, scale)
        # PyTorch's flash attention returns tensors with these strides, whatever the strides of q are.
        tokens_first = out.transpose(1, 2).contiguous().transpose(1, 2)
        return (
            tokens_first,
            lse,
            None,
            None,
            q.size(2),
            k.size(2),
            torch.zeros(2),
            torch.zeros(()),
            torch.zeros(0),
        )

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, ...]:
        group = q.size(1) // k.size(1)
        p = torch.exp(self.scores(q, k, causal, scale) - lse.double()[..., None])
        wide_k, wide_v = (t.double().repeat_interleave(group, 1) for t in (k, v))
        ds = p * (
            grad_out.double() @ wide_v.transpose(-1, -2)
            - (grad_out.double() * out.double()).sum(-1, keepdim=True)
        )
        grads = (
            scale * ds @ wide_k,
            scale * ds.transpose(-1, -2) @ q.double(),
            p.transpose(-1, -2) @ grad_out.double(),
        )
        narrow = [
            g if g.size(1) == t.size(1) else g.unflatten(1, (-1, group)).sum(2)
            for g, t in zip(grads, (q, k, v))
        ]
        return tuple(g.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2) for g in narrow)

    def cudnn_backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        bias: Any,
        starts_q: Any,
        starts_k: Any,
        queries: int,
        keys: int,
        dropout: float,
        causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        assert (
            bias is None
            and starts_q is None
            and starts_k is None
            and (queries, keys) == (q.size(2), k.size(2))
        )
        assert (
            lse.shape == (*q.shape[:3], 1) and dropout == 0 and scale is not None and seed.dtype == torch.long
        )
        # PyTorch caches cuDNN plans by the layouts of q, k and v only. The strides of out and of its gradient
        # must therefore follow from those of q.
        assert out.stride() == torch.empty_like(q).stride() == grad_out.stride()
        self.calls.append("cudnn backward")
        return self.backward(grad_out, q, k, v, out, lse[..., 0], causal, scale)

    def flash_backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        starts_q: Any,
        starts_k: Any,
        queries: int,
        keys: int,
        dropout: float,
        causal: bool,
        seed: Tensor,
        offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        assert starts_q is None and starts_k is None and (queries, keys) == (q.size(2), k.size(2))
        assert lse.shape == q.shape[:3] and dropout == 0 and scale is not None
        self.calls.append("flash backward")
        return self.backward(grad_out, q, k, v, out, lse, causal, scale)


@pytest.fixture
def stand_ins(backend: str) -> Iterator[StandIns]:
    if backend != "simt":
        pytest.skip("stand-ins are for the emulator")
    made = StandIns("flash")
    yield made
    made.library._destroy()


def make(
    batch: int = 2, heads: int = 2, kv_heads: int = 2, queries: int = 9, keys: int = 9, dim: int = 16
) -> list[Tensor]:
    shapes = [(batch, heads, queries, dim), *[(batch, kv_heads, keys, dim)] * 2]
    return [torch.randn(shape).to(torch.bfloat16) for shape in shapes]


def gradients(
    inputs: list[Tensor], upstream: Tensor, lse_upstream: Tensor | None = None, **options: Any
) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = attention(*leaves, return_lse=True, **options)
    loss = (out * upstream).sum() + (0 if lse_upstream is None else (lse * lse_upstream).sum())
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


# Ignore PyTorch's warning that the stand-ins replace registered kernels.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("choice", ["cudnn", "flash"])
@pytest.mark.parametrize(("kv_heads", "keys"), [(2, 9), (1, 9), (2, 13)])
def test_results_are_those_of_our_kernels(
    choice: str, causal: bool, transposed: bool, kv_heads: int, keys: int, stand_ins: StandIns
) -> None:
    stand_ins.choice = choice
    inputs = make(kv_heads=kv_heads, keys=keys)
    if transposed:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    upstream = torch.randn(2, 2, 9, 16).to(torch.bfloat16)
    theirs = gradients(inputs, upstream, causal=causal)
    assert stand_ins.calls == (
        [] if causal and keys != 9 else ["choose", choice, "choose", f"{choice} backward"]
    )
    ours = gradients(inputs, upstream, causal=causal, deterministic=True)
    for a, b in zip(theirs, ours):
        assert relative_error(a, b) < 1e-2 and a.dtype == b.dtype and a.stride() == b.stride()


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_of_lse_is_ours(stand_ins: StandIns) -> None:
    inputs, upstream, lse_upstream = make(), torch.randn(2, 2, 9, 16).to(torch.bfloat16), torch.randn(2, 2, 9)
    theirs = gradients(inputs, upstream, lse_upstream, causal=True)
    assert stand_ins.calls == ["choose", "flash"]
    ours = gradients(inputs, upstream, lse_upstream, causal=True, deterministic=True)
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(theirs, ours))


@pytest.mark.filterwarnings("ignore")
def test_only_the_gradients_that_are_asked_for(stand_ins: StandIns) -> None:
    q, k, v = make()
    (grad,) = torch.autograd.grad(attention(q, k.requires_grad_(), v).float().sum(), k)
    assert stand_ins.calls[-1] == "flash backward" and grad.shape == k.shape


@pytest.mark.filterwarnings("ignore")
def test_what_stays_with_our_kernels(stand_ins: StandIns) -> None:
    q, k, v = make()
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    flat = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    for tensors, options in (
        ((q, k, v), {"bias": torch.zeros(1, 1, 1, 9)}),
        ((q, k, v), {"alibi_slopes": torch.zeros(2)}),
        ((q, k, v), {"sinks": torch.zeros(2)}),
        ((q, k, v), {"softcap": 3.0}),
        ((q, k, v), {"window_size": (3, -1)}),
        ((q, k, v), {"window_size": (-1, 3)}),
        ((q, k, v), {"dropout_p": 0.1, "seed": torch.tensor([1])}),
        ((q, k, v), {"scale": -1.0}),
        ((q, k, v), {"deterministic": True}),
        ((q, k[:, :, :5], v[:, :, :5]), {"causal": True}),
        ((q, k, v[..., :8]), {}),
        ([t[..., :12] for t in (q, k, v)], {}),
        ([t.float() for t in (q, k, v)], {}),
        (flat, {"cu_seqlens_q": starts}),
    ):
        attention(*tensors, **options)
        assert stand_ins.calls == [], options
    for choice in ("math", "efficient", "error"):
        stand_ins.choice = choice
        attention(q, k, v)
        assert stand_ins.calls == ["choose"]
        stand_ins.calls.clear()


@pytest.mark.filterwarnings("ignore")
def test_deterministic_follows_pytorch(stand_ins: StandIns) -> None:
    q, k, v = make()
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        attention(q, k, v)
        assert stand_ins.calls == []
        attention(q, k, v, deterministic=False)
        assert stand_ins.calls == ["choose", "flash"]
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.sample(simt=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(64, 64, 64), (100, 100, 128), (33, 70, 64)])
def test_by_default_as_exact_as_our_kernels(
    queries: int, keys: int, dim: int, dtype: torch.dtype, backend: str
) -> None:
    """Calls with default arguments are as exact as calls with ``deterministic=True``.

    On a GPU, default calls use PyTorch's operators where possible; deterministic calls use shoestring's
    kernels.
    """
    inputs = [t.to(dtype) for t in make(1, 4 if backend == "cuda" else 1, 1, queries, keys, dim)]
    upstream = torch.randn(1, inputs[0].size(1), queries, dim).to(dtype)
    for causal in (False, True):
        exact = attention_reference(*(t.double() for t in inputs), causal=causal)
        default, ours = (gradients(inputs, upstream, causal=causal, deterministic=d) for d in (None, True))
        for a, b in zip(default, ours):
            assert relative_error(a, b) < 2e-2 and a.stride() == b.stride()
        for result in (default, ours):
            assert relative_error(result[0], exact.out) < 5e-3
            assert (result[1] - exact.lse).abs().nan_to_num().max() < 1e-4
