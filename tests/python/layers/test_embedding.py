from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import shoestring
from operator_cases import Operator, integers, normal
from operator_tests import OperatorTests
from references.layers import embedding_reference
from relative_error import relative_error
from thread_counts import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Shapes of the ids with the rows and features of the weight: none, one row, rows without ids, more ids than
# rows, more rows than ids, and enough for two threads.
SHAPES = [
    ((0,), 5, 3),
    ((), 1, 1),
    ((2, 7), 40, 13),
    ((300,), 4, 33),
    ((3, 5), 5000, 7),
    ((1000,), 4000, 256),
]


class TestEmbedding(OperatorTests):
    operator = Operator(
        "embedding",
        embedding_reference,
        lambda ids, features: {"ids": integers(ids, high=40), "weight": normal(40, features)},
        sizes=[(14, 13)],
        options=[{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}],
        twice_differentiable=True,
    )


def results(
    operator: Any, ids: Tensor, weight: Tensor, upstream: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    leaf = weight.clone().requires_grad_()
    y = operator(ids, leaf, **options)
    return y, torch.autograd.grad(y, leaf, upstream)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}], ids=str)
def test_no_worse_than_eager(
    shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    sizes, rows, features = shape
    ids = torch.randint(rows, sizes)
    weight, upstream = torch.randn(rows, features), torch.randn(*sizes, features)
    exact = results(
        embedding_reference, ids, weight.to(dtype).double(), upstream.to(dtype).double(), **options
    )
    eager = results(embedding_reference, ids, weight.to(dtype), upstream.to(dtype), **options)
    for of in (torch.int64, torch.int32):
        ours = results(shoestring.embedding, ids.to(of), weight.to(dtype), upstream.to(dtype), **options)
        assert torch.equal(ours[0], eager[0]) and ours[1].dtype == dtype
        assert ours[1].shape == (rows, features)
        # In fp64, the exact result is PyTorch's own, whose sums round as ours do but in another order.
        error = torch.finfo(dtype).eps * (
            max(1, ids.numel() / rows) ** 0.5 if dtype == torch.float64 else 0.25
        )
        assert relative_error(ours[1], exact[1]) <= 1.1 * relative_error(eager[1], exact[1]) + error


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """Repeated ids are added in the order in which they occur, however the rows are divided among threads."""
    ids = torch.randint(70, (4000,)) * 60
    weight, upstream = torch.randn(4200, 96).to(dtype), torch.randn(4000, 96).to(dtype)
    found = assert_same_bits(lambda: results(shoestring.embedding, ids, weight, upstream), (1, 2, 3, 7))[0]
    last = torch.zeros(96)
    for i in (ids == ids[-1]).nonzero().squeeze(1).tolist():
        last += upstream[i].float()
    assert torch.equal(found[1][ids[-1]], last.to(dtype))


def test_strides() -> None:
    ids, weight = torch.randint(30, (6, 4)).t(), torch.randn(8, 30).t()
    upstream = torch.randn(8, 6, 4).permute(2, 1, 0)
    ours = results(shoestring.embedding, ids, weight, upstream)
    expected = results(embedding_reference, ids, weight, upstream)
    assert torch.equal(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1])
    broadcast = torch.ones(()).expand(4, 6, 8)
    assert torch.equal(
        results(shoestring.embedding, ids, weight, broadcast)[1].sum(1),
        torch.bincount(ids.reshape(-1), minlength=30) * 8.0,
    )


def test_not_finite_gradients_stay_in_their_rows() -> None:
    ids = torch.tensor([1, 1, 2, 4])
    upstream = torch.tensor([[float("inf")], [-float("inf")], [float("nan")], [1e38]]).expand(4, 20)
    grad = results(shoestring.embedding, ids, torch.randn(6, 20), upstream)[1]
    assert grad[1:3].isnan().all() and (grad[4] == 1e38).all() and (grad[[0, 3, 5]] == 0).all()


@pytest.mark.parametrize("padding_idx", [1, -2])
def test_padding_idx_counts_from_the_end(padding_idx: int) -> None:
    ids = torch.tensor([0, 1, 1, 2])
    grad = results(shoestring.embedding, ids, torch.randn(3, 4), torch.ones(4, 4), padding_idx=padding_idx)[1]
    assert grad[:, 0].tolist() == [1, 0, 1]


def test_the_gradient_is_stored_without_a_copy() -> None:
    """Neither zeros nor a copy of the gradient are written, and backward saves the ids only."""
    weight, ids = torch.randn(3000, 64, requires_grad=True), torch.randint(3000, (50,))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = shoestring.embedding(ids, weight)
    assert [s.shape for s in saved] == [ids.shape]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        y.backward(torch.ones_like(y))
    names = {event.key for event in trace.key_averages()}
    assert "shoestring::_embedding_backward" in names
    assert not names & {"aten::clone", "aten::copy_", "aten::add", "aten::zeros", "aten::zero_", "aten::add_"}
    shoestring.embedding(ids, weight).sum().backward()
    assert weight.grad is not None and weight.grad.sum() == 2 * y.numel()


def test_second_derivative_with_padding() -> None:
    ids = torch.tensor([[0, 3, 3], [1, 0, 3]])
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    # The gradient without the row of padding is no derivative, but the gradient of this gradient is one.
    assert torch.autograd.gradgradcheck(
        lambda w: shoestring.embedding(ids, w, padding_idx=3).square(), weight
    )


def test_opcheck() -> None:
    ids, weight = torch.randint(9, (4, 3)), torch.randn(9, 20, requires_grad=True)
    torch.library.opcheck(torch.ops.shoestring.embedding.default, (ids, weight), {"padding_idx": 2})
    torch.library.opcheck(
        torch.ops.shoestring._embedding_backward.default, (torch.randn(4, 3, 20), ids, 9, None, True)
    )


def test_compile() -> None:
    weight = torch.randn(50, 16, requires_grad=True)
    compiled = torch.compile(
        lambda i: shoestring.embedding(i, weight, padding_idx=3) * 2, fullgraph=True, dynamic=True
    )
    for count in (7, 12):
        ids = torch.randint(50, (2, count))
        found = []
        for function in (compiled, lambda i: embedding_reference(i, weight, padding_idx=3) * 2):
            y = function(ids)
            found.append((y, *torch.autograd.grad(y.square().sum(), weight)))
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected)


def test_meta() -> None:
    ids, weight = torch.randint(9, (4,)), torch.randn(9, 20, requires_grad=True)
    assert shoestring.embedding(ids.to("meta"), weight.to("meta")).shape == (4, 20)
    assert not shoestring.embedding(ids, weight.detach()).requires_grad


def test_errors() -> None:
    weight = torch.randn(3, 2)
    for bad in (-1, 3, 2**40):
        with pytest.raises(IndexError, match=f"embedding: ids: expected rows of the weight.*received {bad}"):
            shoestring.embedding(torch.tensor([0, bad]), weight)
        with pytest.raises(IndexError, match=f"_embedding_backward: ids: expected.*received {bad}"):
            torch.ops.shoestring._embedding_backward(torch.ones(1, 2), torch.tensor([bad]), 3, None, False)
    with pytest.raises(RuntimeError, match="embedding: ids: expected int64 or int32, received Float"):
        shoestring.embedding(torch.ones(2), weight)
    with pytest.raises(RuntimeError, match=r"embedding: weight: expected shape \(rows, features\)"):
        shoestring.embedding(torch.tensor([0]), weight[0])
    with pytest.raises(
        RuntimeError, match="embedding: weight: expected fp32, fp64, bf16 or fp16, received Int"
    ):
        shoestring.embedding(torch.tensor([0]), weight.int())
    for padding in (3, -4):
        with pytest.raises(
            RuntimeError, match="embedding: padding_idx: expected None or a row of the weight"
        ):
            shoestring.embedding(torch.tensor([0]), weight, padding_idx=padding)
    with pytest.raises(RuntimeError, match="embedding: ids: expected a tensor on meta, received one on cpu"):
        shoestring.embedding(torch.tensor([0]), weight.to("meta"))
    with pytest.raises(RuntimeError, match="_embedding_backward: grad_output: expected the shape of ids"):
        torch.ops.shoestring._embedding_backward(torch.ones(2, 2), torch.tensor([0]), 3, None, False)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def build(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**config | {"num_attention_heads": 2, "num_key_value_heads": 2} | options)
    )


def uses(model: nn.Module, ids: Tensor) -> bool:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        model(input_ids=ids, labels=ids).loss.backward()
    return "shoestring::_embedding_backward" in {event.key for event in trace.key_averages()}


@pytest.mark.parametrize("tied", [False, True])
def test_patch(tied: bool, tmp_path: Path) -> None:
    model, ids = build(tie_word_embeddings=tied, pad_token_id=5), torch.randint(64, (2, 9))
    ids[0, :3] = 5
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    report = shoestring.patch(model)
    assert any(change.where == "model.embed_tokens" for change in report.changes)
    assert uses(model, ids)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=2e-6, rtol=1e-4)
    model.save_pretrained(tmp_path)
    report.undo()
    assert type(model.model.embed_tokens) is nn.Embedding and not uses(model, ids)
    report = shoestring.patch(model, embedding=False)
    assert not any(change.where == "model.embed_tokens" for change in report.changes)
    assert not uses(model, ids)


@pytest.mark.parametrize("kind", ["max_norm", "sparse", "subclass", "frozen", "no_grad", "adapter"])
def test_patch_leaves_alone(kind: str) -> None:
    model, ids = build(), torch.randint(64, (2, 9))
    table = model.model.embed_tokens
    if kind == "max_norm":
        table.max_norm = 0.1
    elif kind == "sparse":
        table.sparse = True
    elif kind == "subclass":
        table.__class__ = Scaled
    elif kind == "frozen":
        table.weight.requires_grad_(False)
    elif kind == "adapter":
        shoestring.lora.apply(model, rank=2, target_modules=["embed_tokens"])
    expected = model(input_ids=ids, labels=ids).loss
    report = shoestring.patch(model)
    reasons = {"max_norm": "max_norm", "sparse": "sparse gradients", "subclass": "forward of its own"}
    reasons["adapter"] = "forward of its own"
    told = [why for where, why in report.left if where == "model.embed_tokens"]
    assert len(told) == (kind in reasons) and all(reasons[kind] in why for why in told)
    if kind == "no_grad":
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
        assert uses(model, ids)
        return
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, atol=1e-5, rtol=1e-5)
    assert not uses(model, ids)
    if kind == "sparse":
        assert table.weight.grad is not None and table.weight.grad.is_sparse
