"""Test shoestring.checkpoint: gradients are bit for bit those of the same function without a checkpoint."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import shoestring
from shoestring import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(1, -1, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + shoestring.attention(q, k, v, causal=True).transpose(1, 2).reshape(x.shape)
        hidden = shoestring.tag_activation(nn.functional.gelu(self.up(x)), "hidden")
        return x + nn.functional.dropout(self.down(hidden), 0.3) * x.sigmoid()


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Fill new tensors with NaN, so that reading one before it is written has an effect."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def computed(*operators: str) -> Iterator[dict[str, int]]:
    """Count the calls of the CPU kernels of ``operators``, such as "aten::exp".

    A dispatch mode cannot count calls of kernels, because it may also see calls for which a checkpoint
    returns a kept result.
    """
    counts = dict.fromkeys(operators, 0)

    def counting(operator: str) -> Callable[..., Any]:
        kernel = torch.library.get_kernel(operator, "CPU")

        def run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            counts[operator] += 1
            return kernel.call_boxed(keys, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for operator in operators:
            namespace, _, name = operator.partition("::")
            library = stack.enter_context(torch.library._scoped_library(namespace, "IMPL"))
            library.impl(name, counting(operator), "CPU", with_keyset=True, allow_override=True)
        yield counts


def gradients(loss: Callable[[], Tensor], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return torch.autograd.grad(loss(), of)


def check_same(received: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(received) == len(expected)
    for i, (one, other) in enumerate(zip(received, expected, strict=True)):
        assert torch.equal(one, other), f"gradient {i}: {(one - other).abs().max().item()}"


KEEP: list[list[Any]] = [
    [],
    ["products"],
    ["attention", "hidden"],
    [torch.ops.aten.addmm.default, torch.ops.shoestring.attention_with_lse],
    ["aten::gelu", torch.ops.aten.sigmoid],
]


@pytest.mark.parametrize("keep", KEEP, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients(keep: list[Any], autocast: bool) -> None:
    block, x = Block(), torch.randn(6, 8, requires_grad=True)
    of = [x, *block.parameters()]

    def loss(run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(run(x))
        return y.float().pow(2).sum()

    expected = gradients(lambda: loss(block), of)
    check_same(gradients(lambda: loss(lambda t: checkpoint(block, t, keep=keep)), of), expected)
    nested = gradients(lambda: loss(lambda t: checkpoint(lambda u: checkpoint(block, u), t, keep=keep)), of)
    check_same(nested, expected)


def test_arguments_and_results() -> None:
    a, b = torch.randn(4, requires_grad=True), torch.randn(4)

    def run(a: Tensor, pair: tuple[Tensor, int], *, scale: float, name: str) -> dict[str, Any]:
        return {name: a.exp() * pair[0].sin() * scale, "index": a.argmax(), "n": pair[1]}

    result = checkpoint(run, a, (b, 3), scale=2.0, name="y")
    assert result["n"] == 3 and result["index"].dtype == torch.int64
    check_same(
        torch.autograd.grad(result["y"].sum(), a),
        torch.autograd.grad(run(a, (b, 3), scale=2.0, name="y")["y"].sum(), a),
    )


def test_computes_what_it_keeps_once() -> None:
    block, x = Block(), torch.randn(6, 8, requires_grad=True)

    def counts(keep: list[Any]) -> dict[str, int]:
        with computed("aten::addmm", "aten::gelu", "shoestring::attention_with_lse") as calls:
            checkpoint(block, x, keep=keep).sum().backward()
        return calls

    assert counts([])["aten::addmm"] == 6
    assert counts(["products"])["aten::addmm"] == 3
    assert counts(["attention"])["shoestring::attention_with_lse"] == 1
    assert counts([])["shoestring::attention_with_lse"] == 2
    assert counts(["hidden"])["aten::gelu"] == 1
    assert counts([torch.ops.aten.gelu.default])["aten::gelu"] == 1


OPS = torch.ops.shoestring
X, W, IDS = torch.randn(6, 8), torch.randn(8), torch.arange(6) % 5
LORA = (torch.randn(8, 8), None, None, None, torch.randn(2, 8), torch.randn(8, 2))
TEACHER = (torch.randn(6, 8), torch.randn(5, 8))
# For each operator, a call of it, and the operator that runs in its place under autograd.
CALLS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "add_layer_norm": (lambda x: OPS.add_layer_norm(x, X, W, eps=1e-5)[0], "_layer_norm_forward"),
    "add_rms_norm": (lambda x: OPS.add_rms_norm(x, X, W, eps=1e-5)[0], "_rms_norm_forward"),
    "attention": (lambda x: OPS.attention(x[None, None], x[None, None], x[None, None]), "attention_with_lse"),
    "attention_with_lse": (
        lambda x: OPS.attention_with_lse(x[None, None], x[None, None], x[None, None], torch.ones(6, 6))[0],
        "_attention_forward",
    ),
    "cross_entropy": (lambda x: OPS.cross_entropy(x, IDS), "_cross_entropy_rows"),
    "cross_entropy_with_stats": (lambda x: OPS.cross_entropy_with_stats(x, IDS)[0], "_cross_entropy_rows"),
    "geglu": (lambda x: OPS.geglu(x, x), "geglu"),
    "layer_norm": (lambda x: OPS.layer_norm(x, W, eps=1e-5), "_layer_norm_forward"),
    "linear": (lambda x: OPS.linear(x, TEACHER[1]), "linear_group"),
    "linear_cross_entropy": (
        lambda x: OPS.linear_cross_entropy(x, TEACHER[1], IDS), "_linear_cross_entropy_rows",
    ),
    "linear_cross_entropy_shard": (
        lambda x: OPS.linear_cross_entropy_shard(x, TEACHER[1], IDS, first_class=0)[0], "_linear_cross_entropy_rows",
    ),
    "linear_cross_entropy_with_stats": (
        lambda x: OPS.linear_cross_entropy_with_stats(x, TEACHER[1], IDS)[0], "_linear_cross_entropy_rows",
    ),
    "linear_distillation": (
        lambda x: OPS.linear_distillation(x, TEACHER[1], *TEACHER), "_linear_distillation_rows",
    ),
    "linear_group": (lambda x: OPS.linear_group(x, [TEACHER[1]], [None])[0], "linear_group"),
    "lora_linear": (lambda x: OPS.lora_linear(x, *LORA), "_lora_linear_group_forward"),
    "lora_linear_group": (
        lambda x: OPS.lora_linear_group(x, [*LORA, None, None], None, None, 0.0, [1.0], ["nf4"], [64])[0],
        "_lora_linear_group_forward",
    ),
    "rms_norm": (lambda x: OPS.rms_norm(x, W, eps=1e-5), "_rms_norm_forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_is_kept_by_its_name(name: str) -> None:
    """Autograd runs another operator in place of some operators."""
    call, inner = CALLS[name]
    x = torch.randn(6, 8, requires_grad=True)
    expected = gradients(lambda: call(x).sin().sum(), [x])

    def count(*keep: Any) -> int:
        with computed(f"shoestring::{inner}") as calls:
            check_same(
                gradients(lambda: checkpoint(lambda x: call(x).sin(), x, keep=keep).sum(), [x]), expected
            )
        return calls[f"shoestring::{inner}"]

    for operator in (getattr(OPS, name), getattr(OPS, name).default):
        if inner == "_linear_cross_entropy_rows":  # It can add to gradients in place.
            with pytest.raises(RuntimeError, match="so there is no result to keep"):
                count(operator)
        else:
            assert count(operator) == count() - 1


def test_groups_keep_operators_of_shoestring() -> None:
    q, bias = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 1, 5, 5, requires_grad=True)
    with computed("shoestring::_attention_forward", "shoestring::linear_group") as calls:
        out = checkpoint(lambda q: shoestring.attention(q, q, q, bias=bias).sin(), q, keep=["attention"])
        out.sum().backward()
        x = torch.randn(6, 8, requires_grad=True)
        checkpoint(
            lambda x: shoestring.ops.linear(x, TEACHER[1]).sin(), x, keep=["products"]
        ).sum().backward()
    assert set(calls.values()) == {1}


def test_what_is_kept_goes_through_hooks_around() -> None:
    block, x = Block(), torch.randn(6, 8, requires_grad=True)
    packed: list[Tensor] = []

    def loss(keep: list[Any]) -> Tensor:
        def pack(t: Tensor) -> int:
            packed.append(t)
            return len(packed) - 1

        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
            return checkpoint(block, x, keep=keep).sum()

    of = [x, *block.parameters()]
    expected = gradients(lambda: block(x).sum(), of)
    check_same(gradients(lambda: loss([]), of), expected)
    # The checkpoint saves its input, and an empty tensor to which PyTorch attaches the checkpoint's autograd
    # node.
    assert [tuple(t.shape) for t in packed if t.numel()] == [(6, 8)]
    check_same(gradients(lambda: loss(["hidden", "attention"]), of), expected)
    assert sorted(tuple(t.shape) for t in packed if t.numel()) == [(1, 2, 6), (1, 2, 6, 4), (6, 8), (6, 32)]


def test_runs_up_to_the_last_saved_tensor() -> None:
    ends = []

    def run(x: Tensor) -> Tensor:
        y = x.exp().sin() + 1
        ends.append(1)
        return y

    x = torch.randn(3, requires_grad=True)
    checkpoint(run, x).sum().backward()
    assert len(ends) == 1
    checkpoint(run, x, early_stop=False).sum().backward()
    assert len(ends) == 3


@pytest.mark.parametrize(
    "fn",
    [
        nn.RReLU(0.1, 0.9),
        nn.Sequential(nn.Linear(64, 64), nn.RReLU()),
        lambda x: nn.functional.rrelu(x.sin(), 0.1, 0.9, training=True),
        lambda x: torch.rrelu(x, 0.1, 0.9, True),
    ],
    ids=["module", "model", "functional", "torch"],
)
def test_noise_that_is_drawn_after_it_is_saved(fn: Callable[[Tensor], Tensor]) -> None:
    """RReLU saves its noise last, and draws it afterwards."""
    x = torch.randn(64, 64, requires_grad=True)

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(1)
        (found,) = torch.autograd.grad(run(x).square().sum(), x)
        return found

    expected = gradient(fn)
    with empty_is_nan():
        assert torch.equal(gradient(lambda x: checkpoint(fn, x)), expected)


def test_retain_graph_and_second_derivatives() -> None:
    w, x = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return (w.exp() * x).sin() * w * x

    def second(y: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (x, w))

    for keep in ([], ["aten::exp"]):
        y = checkpoint(run, x, keep=keep)
        once = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        check_same(torch.autograd.grad(y.sum(), (x, w)), once)
        check_same(once, torch.autograd.grad(run(x).sum(), (x, w)))
        check_same(second(checkpoint(run, x, keep=keep)), second(run(x)))


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_sequential(segments: int) -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    x = torch.randn(3, 6, requires_grad=True)
    of = [x, *layers.parameters()]
    ours = gradients(
        lambda: shoestring.checkpoint_sequential(layers, segments, x, keep=["products"]).sum(), of
    )
    check_same(ours, gradients(lambda: layers(x).sum(), of))


@pytest.mark.parametrize("keep", [[], ["attention", "products"]], ids=str)
def test_compiles(keep: list[str]) -> None:
    # torch.compile limits the number of recompilations. The reset keeps those of other tests from counting.
    torch.compiler.reset()
    block, x = Block(), torch.randn(6, 8, requires_grad=True)
    compiled = torch.compile(
        lambda t: checkpoint(block, t, keep=keep).sum(), backend="aot_eager", fullgraph=True
    )
    received = gradients(lambda: compiled(x), [x, *block.parameters()])
    for one, other in zip(received, gradients(lambda: block(x).sum(), [x, *block.parameters()]), strict=True):
        torch.testing.assert_close(one, other)


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    fail, x = [True], torch.randn(4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = x.exp()
        if fail[0]:
            raise RuntimeError("out of luck")
        return y.sin()

    with pytest.raises(RuntimeError, match="out of luck"):
        checkpoint(run, x, keep=["aten::exp"])
    fail[0] = False
    y = checkpoint(run, x, keep=["aten::exp"])
    fail[0] = True
    with pytest.raises(RuntimeError, match="out of luck"):
        y.sum().backward(retain_graph=True)
    fail[0] = False
    y.sum().backward()
    check_same([x.grad], torch.autograd.grad(run(x).sum(), x))  # type: ignore[list-item]
    # After the error in the checkpointed function, no checkpoint is active on this thread.
    with computed("aten::exp") as calls:
        x.exp()
    assert calls["aten::exp"] == 1


def test_nothing_is_left_behind() -> None:
    class Function:
        def __call__(self, x: Tensor) -> Tensor:
            return x.exp().sin()

    def used(ends: Callable[[Tensor], object]) -> None:
        fn, x = Function(), torch.randn(4, requires_grad=True)
        alive = weakref.ref(fn)
        y = checkpoint(fn, x, keep=["aten::exp"])
        del fn
        assert alive() is not None
        ends(y)
        del y
        assert alive() is None

    # Garbage collection is off, so the memory is only freed if no reference cycle holds it.
    gc.disable()
    try:
        used(lambda y: y.sum().backward())
        used(lambda y: y.sum().backward(retain_graph=True))
        used(lambda y: None)
    finally:
        gc.enable()


def test_another_second_run_is_an_error() -> None:
    x, runs = torch.randn(4, 4, requires_grad=True), [0]

    def other_shape(x: Tensor) -> Tensor:
        runs[0] += 1
        return (x if runs[0] == 1 else x[:2]).exp().sin()

    def less(x: Tensor) -> Tensor:
        runs[0] += 1
        return x.exp().sin() if runs[0] == 1 else x.exp()

    shapes = r"float32\[4, 4\] on cpu in forward and is float32\[2, 4\]"
    for fn, message in ((other_shape, shapes), (less, "saved 2 tensors in forward and 1")):
        runs[0] = 0
        with pytest.raises(CheckpointError, match=message):
            checkpoint(fn, x).sum().backward()
    with pytest.raises(RuntimeError, match="inplace"):
        checkpoint(lambda t: t.mul_(2).sin(), x * 1).sum().backward()


@pytest.mark.fresh
def test_the_first_tape_claims_the_dispatch_key() -> None:
    """Loading the library registers no fallback for the dispatch key Fake; the first checkpoint does."""
    key = torch._C._dispatch_key_parse("Fake")
    assert not torch._C._dispatch_has_backend_fallback(key)
    x = torch.randn(3, 3, requires_grad=True)
    checkpoint(torch.mm, x, x).sum().backward()
    assert torch._C._dispatch_has_backend_fallback(key)


def test_the_compiler_is_not_imported() -> None:
    code = (
        "import sys, torch, shoestring\n"
        "x = torch.randn(4, requires_grad=True)\n"
        "shoestring.checkpoint(torch.sin, x, keep=['attention']).sum().backward()\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "shoestring.checkpoint_model(model, ['0', '1'], budget='1MiB', example=lambda: model(x).sum())\n"
        "assert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_refusals() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="aten::no_such.*which is no operator"):
        checkpoint(torch.exp, x, keep=["aten::no_such"])
    with pytest.raises(RuntimeError, match="aten::relu_"):
        checkpoint(lambda t: t.exp().relu_(), x, keep=["aten::relu_"])
    with pytest.raises(RuntimeError, match="modified in place"):
        checkpoint(lambda t: t.cos().mul_(2).exp(), x, keep=["aten::cos"]).sum().backward()
    with pytest.raises(RuntimeError, match="tag_activation: made"):
        checkpoint(lambda t: shoestring.tag_activation(t.exp().add_(1), "made"), x, keep=["made"])
    with pytest.raises(TypeError, match='write \\["attention"\\]'):
        checkpoint(torch.exp, x, keep="attention")
    with pytest.raises(TypeError, match="expected operators, groups or tags, received 3"):
        checkpoint(torch.exp, x, keep=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="segments: expected 1 to the number of functions"):
        shoestring.checkpoint_sequential([torch.exp], 2, x)
