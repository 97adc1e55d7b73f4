import pytest
import torch

import shoestring
from references.layers import gelu_reference
from relative_error import relative_error

pytestmark = pytest.mark.device

# Element counts: none, less than one SIMD vector, several vectors and a remainder, and enough for two
# threads.
SIZES = [0, 3, 77, 33000]
KINDS = ["tanh", "none"]


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_no_worse_than_eager(capability: str, size: int, dtype: torch.dtype, approximate: str) -> None:
    x, upstream = torch.randn(size).mul(3).to(dtype), torch.randn(size).to(dtype)
    results = []
    for operator, compute in (
        (shoestring.gelu, dtype),
        (gelu_reference, torch.float64),
        (gelu_reference, dtype),
    ):
        leaf = x.to(compute).requires_grad_()
        y = operator(leaf, approximate)
        results.append((y, *torch.autograd.grad(y, leaf, upstream.to(compute))))
    for ours, exact, eager in zip(*results, strict=True):
        assert ours.dtype == dtype and ours.shape == (size,)
        if size:
            # Over few elements eager's error may happen to be almost 0, so allow errors of two roundings.
            least = 1e-7 if size > 100 else 2 * torch.finfo(torch.float32).eps
            assert relative_error(ours, exact) <= 1.1 * relative_error(eager, exact) + least


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_geglu_with_a_factor_of_one(capability: str, dtype: torch.dtype, approximate: str) -> None:
    """gelu and geglu share their kernels, so a factor of 1 changes no bit of the result or the gradient."""
    x, upstream = torch.randn(2, 77).mul(6).to(dtype)
    found = []
    for operator in (shoestring.gelu, lambda x, kind: shoestring.geglu(x, torch.ones_like(x), kind)):
        leaf = x.detach().requires_grad_()
        y = operator(leaf, approximate)
        found += [y, torch.autograd.grad(y, leaf, upstream)[0]]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("approximate", KINDS)
def test_large_and_not_finite(capability: str, approximate: str) -> None:
    x = torch.tensor([-1e30, -200.0, 0.0, 90.0, 1e30, float("inf"), float("nan")], requires_grad=True)
    y = shoestring.gelu(x, approximate)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 1e30, float("inf"), float("nan")])
    assert torch.equal(y.nan_to_num(nan=7), expected.nan_to_num(nan=7))
    torch.testing.assert_close(gradient[:5], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert gradient[6].isnan()


def test_strides_threads_and_what_is_kept() -> None:
    x = torch.randn(300, 200).t().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = shoestring.gelu(x)
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()
    expected = gelu_reference(x)
    torch.testing.assert_close(y, expected)
    gradient = torch.autograd.grad(y.square().sum(), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again = shoestring.gelu(x)
            assert torch.equal(again, y)
            assert torch.equal(torch.autograd.grad(again.square().sum(), x)[0], gradient)
    finally:
        torch.set_num_threads(threads)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert torch.equal(shoestring.gelu(x), y)


@pytest.mark.parametrize(
    "holder", ["nothing", "linear", "base", "user", "detached", "view", "hooks", "graph"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradient_replaces_an_input_that_nothing_else_holds(dtype: torch.dtype, holder: str) -> None:
    leaf = torch.randn(41, 33, dtype=dtype).requires_grad_()
    x, seen = leaf * 2 if holder != "view" else (leaf * 2)[1:], []
    base = None
    if holder in ("linear", "base"):  # a linear layer with a bias returns a view of all of its product
        base = leaf * 2
        x = base.view(41, 3, 11)
    x.grad_fn.register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    address, held = x.data_ptr(), []
    if holder == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            y = shoestring.gelu(x)
    else:
        y = shoestring.gelu(x)
    if holder in ("user", "detached"):
        held = [x if holder == "user" else x.detach()]
    copies = [t.detach().clone() for t in held]
    if holder == "base":
        held, copies = [base], [base.detach().clone()]
    del x, base
    y.sum().backward(retain_graph=holder == "graph")
    assert (seen == [address]) == (holder in ("nothing", "linear") and dtype != torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    rows = leaf.detach()[1:] if holder == "view" else leaf.detach()
    expected = 2 * torch.ops.shoestring._gelu_backward(torch.ones_like(rows), 2 * rows, "none")
    assert torch.equal(leaf.grad[-len(rows) :], expected)
    if holder == "graph":
        leaf.grad = None
        y.sum().backward()
        assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("approximate", KINDS)
def test_gradcheck_opcheck_and_compiled(approximate: str) -> None:
    wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: shoestring.gelu(x, approximate), (wide,))
    x = torch.randn(4, 70, requires_grad=True)
    torch.library.opcheck(torch.ops.shoestring.gelu.default, (x, approximate))
    y = shoestring.gelu(x, approximate)
    with pytest.raises(RuntimeError, match="gelu: the backward pass is not differentiable"):
        torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum().backward()
    compiled = torch.compile(
        lambda x: shoestring.gelu(x, approximate), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (4, 2):
        few = x[:rows].detach().requires_grad_()
        ours, plain = compiled(few), shoestring.gelu(few, approximate)
        assert torch.equal(ours, plain)
        assert torch.equal(torch.autograd.grad(ours.sum(), few)[0], torch.autograd.grad(plain.sum(), few)[0])


def test_errors() -> None:
    with pytest.raises(RuntimeError, match="gelu: approximate: expected 'tanh' or 'none', received 'erf'"):
        shoestring.gelu(torch.ones(3), "erf")
    with pytest.raises(RuntimeError, match="gelu: x: expected fp32, fp64, bf16 or fp16, received Int"):
        shoestring.gelu(torch.ones(3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="_gelu_backward: grad: expected the shape, dtype and device of x"):
        torch.ops.shoestring._gelu_backward(torch.ones(3), torch.ones(4), "none")
