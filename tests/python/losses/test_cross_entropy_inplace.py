"""Test where cross_entropy writes its gradient, and that no other reader of the logits gets the gradient."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from test_cross_entropy import make, not_a_leaf
from torch import Tensor

import shoestring
from references.losses import cross_entropy_reference
from relative_error import relative_error

pytestmark = pytest.mark.device


def expected_gradient(leaf: Tensor, target: Tensor, upstream: float = 1.0, **options: float | str) -> Tensor:
    exact = leaf.detach().double().requires_grad_()
    loss = cross_entropy_reference(exact, target, **options).loss.sum()
    return torch.autograd.grad(loss * upstream, exact)[0]


def place_of_gradient(logits: Tensor) -> list[int]:
    """Return a list to which backward appends the address (data_ptr) of the gradient of ``logits``."""
    seen: list[int] = []
    logits.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].data_ptr()))
    return seen


def of_the_exponent(logits: Tensor) -> float:
    """Return the relative error of a probability exp(x - lse) whose exponent is rounded in fp32 or fp64.

    The exponent is rounded to half a unit in the last place of its two terms, and exp adds some units of its own.
    """
    eps = torch.finfo(torch.float64 if logits.dtype == torch.float64 else torch.float32).eps
    return eps * (2 + 2 * logits.detach().abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_forward_leaves_the_gradient_where_the_logits_were(dtype: torch.dtype) -> None:
    leaf, target = make(20, 333, dtype=dtype)
    logits = not_a_leaf(leaf)
    seen = place_of_gradient(logits)
    version = logits._version
    loss = shoestring.cross_entropy(logits, target, inplace=True)
    assert logits._version == version + 1
    enlarged = 16 if dtype == torch.float16 else 1
    exact = expected_gradient(leaf, target)
    # In fp64 the reference rounds as well.
    tolerance = torch.finfo(dtype).eps if dtype != torch.float64 else of_the_exponent(leaf)
    assert relative_error(logits.detach() / enlarged, exact) < tolerance
    loss.backward()
    assert seen == [logits.data_ptr()]
    assert relative_error(leaf.grad, exact) < tolerance


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_by_default_backward_takes_the_place_of_logits_that_nobody_has(reduction: str) -> None:
    leaf, target = make(20, 333)
    exact = expected_gradient(leaf, target, reduction=reduction)

    def step(keep: Callable[[Tensor], object]) -> tuple[bool, Tensor]:
        """Return whether the gradient is in the logits' memory, and the gradient of the leaf.

        ``keep`` is called with the logits. If it returns a tensor that shares their memory, cross_entropy
        must not overwrite the logits.
        """
        logits = not_a_leaf(leaf)
        kept = keep(logits)
        place, seen, before = logits.data_ptr(), place_of_gradient(logits), logits.detach().clone()
        loss = shoestring.cross_entropy(logits, target, reduction=reduction).sum()
        del logits
        gradient = torch.autograd.grad(loss, leaf)[0]
        assert relative_error(gradient, exact) < 1e-6
        assert not isinstance(kept, Tensor) or torch.equal(kept.detach().view_as(before), before)
        return seen == [place], gradient

    assert step(lambda logits: None)[0]
    assert not step(lambda logits: logits)[0]
    assert not step(lambda logits: logits.detach())[0]
    assert not step(lambda logits: logits.view(-1))[0]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_default_leaves_what_another_node_saved(reduction: str) -> None:
    leaf, target = make(6, 21)
    logits = not_a_leaf(leaf)
    both = shoestring.cross_entropy(logits, target, reduction=reduction).sum() + logits.square().sum()
    del logits
    gradient = torch.autograd.grad(both, leaf)[0]
    exact = expected_gradient(leaf, target, reduction=reduction) + 2 * leaf.detach().double()
    assert relative_error(gradient, exact) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_that_another_node_saved_are_an_error(reduction: str) -> None:
    """Overwriting logits that another node has saved is an error, which autograd raises in backward."""
    leaf, target = make(6, 21)
    logits = not_a_leaf(leaf)
    other = logits.square().sum()  # square saves the logits for its backward
    loss = shoestring.cross_entropy(logits, target, inplace=True, reduction=reduction).sum()
    # With reduction="none", cross_entropy overwrites the logits in backward. For a scalar loss, its forward
    # has already done so.
    if reduction == "none":
        torch.autograd.grad(loss, leaf)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_that_are_the_saved_output_of_what_made_them_are_an_error() -> None:
    leaf, target = make(6, 21)
    loss = shoestring.cross_entropy(leaf.exp(), target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[:4], lambda x: x[:, :20]], ids=["whole", "rows", "columns"]
)
def test_logits_that_are_used_afterwards_are_an_error(view: Callable[[Tensor], Tensor]) -> None:
    leaf, target = make(6, 21)
    whole = not_a_leaf(leaf)
    logits = view(whole)
    target = target[: len(logits)].clamp_max(19)
    loss = shoestring.cross_entropy(logits, target, inplace=True)
    for later in (logits.square(), whole + 1):
        with pytest.raises(RuntimeError, match="cross_entropy: logits: inplace=True has replaced them"):
            (loss + later.sum()).backward(retain_graph=True)
    torch.autograd.grad(loss, leaf)


def test_a_gradient_that_is_overwritten_before_backward_is_an_error() -> None:
    leaf, target = make(6, 21)
    logits = not_a_leaf(leaf)
    loss = shoestring.cross_entropy(logits, target, inplace=True)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def stay() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions that make logits which ``inplace=True`` must leave unchanged, by name.

    Either autograd forbids to change the logits, or the logits retain their own gradient, or their rows share
    memory.
    """

    def retained(leaf: Tensor) -> Tensor:
        logits = leaf.clone()
        logits.retain_grad()
        return logits

    return {
        "a leaf": lambda leaf: leaf,
        "a view of a leaf": lambda leaf: leaf[:5],
        "one of several views": lambda leaf: leaf.clone().chunk(2)[0],
        "no gradient": lambda leaf: leaf.detach(),
        "a gradient of their own": retained,
        "a view of such": lambda leaf: retained(leaf)[:4],
        "rows in the same memory": lambda leaf: leaf.clone()[:1].expand(6, -1),
        "overlapping rows": lambda leaf: leaf.clone().view(-1).as_strided((6, 21), (20, 1)),
    }


@pytest.mark.parametrize("kind", stay())
def test_logits_that_stay_as_they_are(kind: str) -> None:
    leaf, target = make(6, 21, ignored=0)
    logits = stay()[kind](leaf)
    before, target = logits.detach().clone(), target[: len(logits)]
    loss = shoestring.cross_entropy(logits, target, inplace=True)
    if loss.requires_grad:
        expected = cross_entropy_reference(logits, target).loss
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, leaf)[0])
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_nothing_is_overwritten_without_gradients(off: Callable) -> None:
    leaf, target = make(6, 21)
    logits = not_a_leaf(leaf)
    with off():
        loss = shoestring.cross_entropy(logits, target, inplace=True)
        fresh = leaf * 1
        shoestring.cross_entropy_with_stats(fresh, target, inplace=True)
        assert torch.equal(fresh, leaf)
    assert not loss.requires_grad and torch.equal(logits, leaf) and logits._version == 0


@pytest.mark.parametrize("inplace", [False, True])
# Rows of 333 or 43 classes are not aligned to SIMD vectors.
@pytest.mark.parametrize("shape", [(20, 333), (3, 7, 43)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradients_are_scaled_by_the_upstream_gradient(
    dtype: torch.dtype, shape: tuple[int, ...], inplace: bool
) -> None:
    """Gradients from earlier backward passes do not change, although the last pass works in place.

    All passes use the same retained graph, with different upstream gradients.
    """
    leaf, target = make(*shape, dtype=dtype)
    # slice(0, -1) drops the last token of each sequence: logits are contiguous within a sequence only.
    for cut in (slice(None), slice(0, -1)):
        loss = shoestring.cross_entropy(not_a_leaf(leaf)[..., cut, :], target[..., cut], inplace=inplace)
        once = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        kept = once.clone()
        for factor in (-0.5, 1.0, 4.0):
            upstream = torch.tensor(factor, dtype=loss.dtype)
            scaled = torch.autograd.grad(loss, leaf, upstream, retain_graph=factor != 4)[0]
            exact = expected_gradient(leaf[..., cut, :], target[..., cut], factor)
            # A gradient in place is rounded twice. The smallest fp16 numbers are 6e-8 apart.
            rtol = max(2 * torch.finfo(dtype).eps, of_the_exponent(leaf))
            bound = rtol * exact.abs() + (6e-8 if dtype == torch.float16 else 1e-9)
            # The gradient of the target's logit is a difference, probability - 1, divided by the tokens.
            counted = target[..., cut, None] >= 0
            of_target = counted.double() * rtol * abs(factor) / counted.sum()
            bound.scatter_add_(-1, target[..., cut, None].clamp(min=0), of_target)
            assert ((scaled[..., cut, :].double() - exact).abs() <= bound).all()
            assert (scaled[..., leaf.shape[-2] - 1 :, :] == 0).all() or cut.stop is None
        assert torch.equal(once, kept)


@pytest.mark.parametrize("inplace", [False, True])
def test_double_backward_is_refused(inplace: bool) -> None:
    leaf, target = make(6, 21)
    loss = shoestring.cross_entropy(not_a_leaf(leaf), target, inplace=inplace)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy: the backward pass is not differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_in_a_checkpoint(inplace: bool) -> None:
    leaf, target = make(6, 21)

    def head(x: Tensor) -> Tensor:
        return shoestring.cross_entropy(x.tanh() * 2, target, inplace=inplace)

    loss = torch.utils.checkpoint.checkpoint(head, leaf, use_reentrant=False)
    expected = cross_entropy_reference(leaf.tanh() * 2, target).loss
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, leaf)[0])


CPU_PEAK = """
import resource, torch, shoestring
class Producer(torch.autograd.Function):  # of logits and a gradient that take no memory besides
    @staticmethod
    def forward(ctx, x, shape):
        return torch.ones(shape, dtype={dtype})
    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., 0].float().sum(), None
def run(tokens, vocab):
    x, target = torch.zeros((), requires_grad=True), torch.randint(vocab, (tokens,))
    logits = [Producer.apply(x, (tokens, vocab))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = shoestring.cross_entropy(logits[0] if {inplace} else logits.pop(), target, inplace={inplace}, {options})
    (loss.sum() * 2).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
run(64, 1000)  # whatever the libraries allocate once
print(run(2048, 16384))
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", ["", "reduction='none', softcap=3.0, label_smoothing=0.1"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_of_the_logits_size_is_allocated(
    backend: str, dtype: torch.dtype, inplace: bool, options: str
) -> None:
    """cross_entropy allocates no tensor of the logits' size if it may overwrite the logits.

    It may do so with inplace=True, or if the caller keeps no reference to the logits.
    """
    if backend == "simt":
        pytest.skip("its own allocator tracks every byte")
    if backend == "cpu":
        program = CPU_PEAK.format(dtype=dtype, inplace=inplace, options=options)
        used = float(
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        )
        # The limit of 12 MiB is far below the size of the logits, 128 MiB in fp32 or 64 MiB in 16 bits.
        assert used < 12
        return
    leaf = torch.zeros(2048, 1, dtype=dtype, requires_grad=True)
    target = torch.randint(16384, (2048,))
    logits = [leaf + torch.zeros(2048, 16384, dtype=dtype)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen = eval(f"dict({options})")
    loss = shoestring.cross_entropy(logits[0] if inplace else logits.pop(), target, inplace=inplace, **chosen)
    (loss.sum() * 2).backward()
    assert torch.cuda.max_memory_allocated() - before < 12 << 20
