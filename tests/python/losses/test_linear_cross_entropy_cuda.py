"""Test linear_cross_entropy on a GPU at full size: results, memory, no synchronisation, CUDA graphs."""

import pytest
import torch
from torch import Tensor

import shoestring
from relative_error import relative_error

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def gpu(backend: str) -> None:
    if backend != "cuda":
        pytest.skip("needs --backend=cuda")


def make(
    tokens: int, features: int, vocab: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leaves hidden and weight, and targets, of which about a tenth is -100."""
    hidden = torch.randn(tokens, features, dtype=dtype).requires_grad_()
    weight = torch.empty(vocab, features, dtype=dtype).normal_(std=features**-0.5).requires_grad_()
    target = torch.randint(vocab, (tokens,))
    target[torch.rand(tokens) < 0.1] = -100
    return hidden, weight, target


# A workspace_mb of 0 gives one chunk of tokens. With 1024 MiB, the gradient of the weight is summed over
# several chunks.
@pytest.mark.parametrize("workspace_mb", [0, 1024])
def test_a_large_vocabulary_at_full_size(workspace_mb: int) -> None:
    tokens, features, vocab = 8192, 4096, 131072
    needed = 12 << 30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    hidden, weight, target = make(tokens, features, vocab)
    each = shoestring.linear_cross_entropy(hidden.detach(), weight.detach(), target, reduction="none")
    loss = shoestring.linear_cross_entropy(hidden, weight, target, workspace_mb=workspace_mb)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    x, w = hidden.detach(), weight.detach()
    count = (target != -100).sum()
    torch.testing.assert_close(loss.double(), each.double().sum() / count, rtol=1e-6, atol=0)

    # For 12 tokens, compare loss and gradient of hidden with fp64 results over all classes.
    rows = torch.randperm(tokens)[:12]
    counts = (target[rows] != -100).double()
    logits = torch.cat([x[rows].double() @ part.double().T for part in w.split(16384)], 1)
    classes = target[rows].clamp_min(0)
    exact = (logits.logsumexp(1) - logits.gather(1, classes[:, None])[:, 0]) * counts
    # The tolerance allows for tensor cores, which sum the products of the fp32 logits less exactly.
    assert relative_error(each[rows], exact) < 1e-5
    gradient = logits.softmax(1)
    gradient[torch.arange(len(rows)), classes] -= 1
    gradient *= (counts / count)[:, None]
    exact = sum(g @ part.double() for g, part in zip(gradient.split(16384, 1), w.split(16384)))
    assert relative_error(grad_hidden[rows], exact) < 4e-3  # tolerance for two roundings to bf16
    assert (grad_hidden[target == -100] == 0).all()

    # For some classes, compare the gradient of the weight with fp64 over all tokens. The log-sum-exp comes
    # from the losses, which are checked above.
    counted = target != -100
    x, target, each = x[counted].double(), target[counted], each[counted].double()
    lse = each + torch.cat([(a * w[t].double()).sum(1) for a, t in zip(x.split(1024), target.split(1024))])
    classes = torch.cat([torch.randperm(vocab)[:8], target[:8]])
    gradient = (x @ w[classes].double().T - lse[:, None]).exp() - (target[:, None] == classes).double()
    exact = (gradient / count).T @ x
    assert relative_error(grad_weight[classes], exact) < 4e-3


def test_memory_is_the_gradients_and_the_workspace() -> None:
    tokens, features, vocab = 4096, 512, 32768
    hidden, weight, target = make(tokens, features, vocab)
    # In the first call, cuBLAS allocates its workspace.
    shoestring.linear_cross_entropy(hidden, weight, target).backward()
    gradients = 2 * features * (tokens + vocab)
    # A workspace of 64 MiB gives several chunks of tokens, and an fp32 accumulator for the gradient of the
    # weight. A workspace of 0 means default sizes of chunks and waves (tokens per GEMM), also with an
    # accumulator. 512 MiB are enough for one chunk of all tokens, without an accumulator.
    accumulator = 4 * features * vocab
    default = (256 << 20) + 2048 * vocab * 2 + accumulator
    for workspace_mb, most in ((64, (64 << 20) + accumulator), (0, default), (512, 512 << 20)):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        shoestring.linear_cross_entropy(hidden, weight, target, workspace_mb=workspace_mb).backward()
        used = torch.cuda.max_memory_allocated() - before
        # The limit also allows for a copy of hidden, vectors with one value per token, and rounding to memory
        # pages.
        rest = 2 * features * tokens + (4 << 20)
        assert used <= gradients + most + rest, (workspace_mb, used)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_waits_for_the_gpu(reduction: str) -> None:
    hidden, weight, target = make(1000, 64, 5003)
    bias = torch.randn(5003, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        loss = shoestring.linear_cross_entropy(
            hidden, weight, target, bias, reduction=reduction, workspace_mb=4
        )
        torch.autograd.grad(loss, (hidden, weight, bias), torch.ones_like(loss))

    step()  # the first step creates cuBLAS handles and loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_cuda_graph_replays_it(reduction: str) -> None:
    hidden, weight, target = make(300, 64, 5003)

    def step() -> tuple[Tensor, ...]:
        loss = shoestring.linear_cross_entropy(hidden, weight, target, reduction=reduction, workspace_mb=2)
        return loss, *torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.normal_()
        target.random_(5003)
        # The number of ignored tokens changes. The captured graph must read it from the GPU.
        target[:40] = -100
    graph.replay()
    for replayed, expected in zip(captured, step()):
        assert torch.equal(replayed, expected)
