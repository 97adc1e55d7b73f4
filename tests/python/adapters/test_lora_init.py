"""Test PiSSA, OLoRA, LoftQ and EVA: initial values against PEFT, quantised base weights, saved adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_models import assert_files_agree, llama, logits, randomise
from shoestring import lora
from shoestring.adapters.initialize import Directions
from shoestring.nn import QuantizedLinear


def linear(rows: int = 24, columns: int = 64) -> nn.Sequential:
    """Build a layer whose weight's singular values fall quickly, so that a randomised SVD is accurate."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    u, values, v = torch.linalg.svd(model[0].weight.detach(), full_matrices=False)
    model[0].weight.data = u * values[0] * 0.7 ** torch.arange(len(values)) @ v
    return model


@pytest.mark.parametrize("init", ["pissa", "olora", "pissa_niter_16"])
@pytest.mark.parametrize("rslora", [False, True], ids=["", "rslora"])
def test_values_are_pefts(init: str, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["0"], init_lora_weights=init, use_rslora=rslora
    )
    theirs = peft.get_peft_model(linear(), config).base_model.model[0]
    ours = lora.apply(linear(), config)[0]
    A, B = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
    # "pissa_niter_16" uses a randomised SVD, which is less exact, so the tolerance is larger.
    tolerance = 1e-4 if "niter" in init else 1e-5
    torch.testing.assert_close(ours.weight, theirs.base_layer.weight, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        ours.lora_B["default"] @ ours.lora_A["default"], B @ A, rtol=tolerance, atol=tolerance
    )
    if init == "olora":
        torch.testing.assert_close(ours.lora_A["default"].data, A.data)


@pytest.mark.parametrize(("init", "rslora"), [("pissa", False), ("olora", True)])
def test_files_are_for_the_original_base(init: str, rslora: bool, tmp_path: Path) -> None:
    base = logits(llama())
    options: dict[str, Any] = {"rank": 4, "alpha": 6, "init": init, "rslora": rslora}
    model = lora.apply(llama(), **options)
    assert (logits(model) - base).abs().max() <= 1e-5
    randomise(model)
    assert (logits(model) - base).abs().max() > 1e-2
    assert_files_agree(model, tmp_path)
    # The saved adapter also loads onto a model that already has an adapter of PiSSA or OLoRA, which have
    # changed its base weights. load_adapter first restores the original base weights.
    again = lora.load_adapter(lora.apply(llama(), **options), tmp_path / "ours")
    assert (logits(again) - logits(model)).abs().max() <= 1e-5
    twin = lora.apply(llama(), **options)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.device
def test_the_base_is_what_it_was_when_the_adapter_is_not_in_use() -> None:
    base = linear()
    x = torch.randn(4, 3, 64)
    model, plain = lora.apply(linear(), rank=4, init="pissa", target_modules=["0"]), linear()
    for m in (model, plain):
        torch.manual_seed(6)
        randomise(lora.apply(m, rank=2, adapter_name="b", target_modules=["0"]), "b")
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.manual_seed(7)
    randomise(model)
    lora.set_adapter(model, "default")
    alone = model(x)
    with lora.adapters_per_row(model, ["b", None, "default", "b"]):
        mixed = model(x)
    expected = torch.stack([plain(x)[0], base(x)[1], alone[2], plain(x)[3]])
    torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-5)
    with lora.disable_adapter(model):
        torch.testing.assert_close(model(x), base(x), rtol=1e-4, atol=1e-5)
    lora.set_adapter(model, ["default", "b"])
    torch.testing.assert_close(model(x), alone + plain(x) - base(x), rtol=1e-4, atol=1e-5)
    lora.set_adapter(model, "b")
    expected = model(x)
    lora.merge(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    lora.unmerge(model)
    lora.delete_adapter(model, "default")
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    lora.delete_adapter(model, "b")
    torch.testing.assert_close(model[0].weight, base[0].weight, rtol=1e-5, atol=1e-6)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("quantize", ["nf4", "int4", "int8"])
@pytest.mark.parametrize("init", ["pissa", "olora", "loftq"])
def test_over_quantised_bases(init: str, quantize: str) -> None:
    """With LoftQ, base plus adapter is closer to the dense weight than the quantised weight alone.

    With PiSSA and OLoRA, the distance of base plus adapter from the dense weight is at most twice the
    distance of the quantised weight.
    """
    dense = linear(48)[0].weight.detach()
    model = lora.apply(
        linear(48), rank=8, alpha=16, init=init, quantize=quantize, loftq_iterations=3, target_modules=["0"]
    )
    plain = lora.apply(linear(48), rank=8, quantize=quantize, target_modules=["0"])[0]
    own = model[0]
    error = (own.merged(["default"])["weight"] - dense).norm()
    # PiSSA and OLoRA quantise the residual of the weight, and elements of OLoRA's residual can be larger than
    # those of the weight, so the bound on the error is wider.
    assert error < (plain.dense_weight() - dense).norm() * (1 if init == "loftq" else 2)
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), x @ own.merged(["default"])["weight"].T, rtol=1e-4, atol=1e-4)
    # Without the adapter, the model computes with the original weight up to quantisation error.
    with lora.disable_adapter(model):
        assert (model(x) - x @ dense.T).norm() < 2 * (x @ (plain.dense_weight() - dense).T).norm()


def test_loftq_loses_less_than_quantising_and_more_iterations_less() -> None:
    dense = linear(48)[0].weight.detach()

    def error(iterations: int, **options: object) -> float:
        own = lora.apply(linear(48), rank=8, quantize="nf4", target_modules=["0"], **options)[0]
        return (own.merged(["default"])["weight"] - dense).norm().item()

    errors = [error(0)] + [error(n, init="loftq", loftq_iterations=n) for n in (1, 5)]
    assert errors[1] < 0.9 * errors[0] and errors[2] < errors[1]


def test_a_base_quantised_before() -> None:
    quantised = nn.Sequential(QuantizedLinear.from_linear(linear(48)[0]))
    before = quantised[0].weight.dequantize()
    model = lora.apply(quantised, rank=8, init="pissa", target_modules=["0"])
    own = model[0]
    assert own.weight.quant_type == "nf4" and not torch.equal(own.dense_weight(), before)
    assert (own.merged(["default"])["weight"] - before).norm() < 0.1 * before.norm()


def test_incremental_directions_are_those_of_peft() -> None:
    peft_pca = pytest.importorskip("peft.utils.incremental_pca")
    from shoestring.adapters.initialize import Directions

    torch.manual_seed(1)
    rows = torch.randn(5, 40, 16) * torch.arange(1, 17).flip(0) + 3
    ours, theirs = Directions(6), peft_pca.IncrementalPCA(n_components=6)
    for batch in rows:
        ours.update(batch)
        theirs.partial_fit(batch)
    torch.testing.assert_close(ours.vectors, theirs.components_.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours.explained(), theirs.explained_variance_ratio_.float(), rtol=1e-4, atol=1e-5
    )
    whole = Directions(16)
    for batch in rows:
        whole.update(batch)
    centred = rows.flatten(0, 1) - rows.mean((0, 1))
    values, vectors = torch.linalg.svd(centred, full_matrices=False)[1:]
    torch.testing.assert_close(
        whole.explained(), values.square() / values.square().sum(), rtol=1e-4, atol=1e-5
    )
    assert ((whole.vectors * vectors).sum(1).abs() - 1).abs().max() < 1e-4


@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_eva_follows_what_the_layers_read(
    rho: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora.apply(llama(), rank=3, alpha=6, init="eva", lora_bias=True)
    before = logits(model)
    ids = torch.randint(97, (4, 2, 32))
    mask = torch.ones(4, 2, 32, dtype=torch.long)
    mask[:, 1, 20:] = 0
    inputs = []
    name = "model.layers.0.self_attn.q_proj"
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    batches = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]
    for batch, m in zip(batches, mask, strict=True):
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :5] = -100  # EVA must skip tokens with an ignored label, as it skips padding
        m[:, :5] = 0
        batch["attention_mask"] = m.clone()
        batch["attention_mask"][:, :5] = 1
    reads = Directions.update
    rows: list[int] = []
    monkeypatch.setattr(Directions, "update", lambda d, x: rows.append(x.shape[0]) or reads(d, x))
    ranks = lora.initialize_eva(model, batches, rho=rho)
    handle.remove()
    assert set(rows) == {32 - 5 + 20 - 5}
    assert sum(ranks.values()) == 3 * 14 and max(ranks.values()) <= 3 * rho
    assert set(ranks.values()) == {3} if rho == 1 else len(set(ranks.values())) > 1
    assert (logits(model) - before).abs().max() <= 1e-6  # lora_B is zero, so the logits do not change
    own = model.get_submodule(name)
    rank = ranks[name]
    assert own.adapters["default"].rank == rank and own.adapters["default"].scaling == 2
    rows = torch.cat([x[m.bool()] for x, m in zip(inputs, mask, strict=True)])
    exact = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][0]
    # EVA truncates the principal directions after each batch, so they are only close to the exact directions.
    assert (own.lora_A["default"][0] @ exact).abs() > 0.9
    assert all(p.requires_grad for p in own.tensors("default").values())
    assert_files_agree(randomise(model), tmp_path)


def test_errors() -> None:
    for options, message in [
        ({"init": "loftq"}, "init: expected quantize with 'loftq', .* received none"),
        (
            {"init": "pissa", "rank": 65},
            r"rank: expected at most 24 for 'pissa', the smaller side of 0; received 65",
        ),
        ({"init": "pissa_niter_0"}, "init: .* received 'pissa_niter_0'"),
        ({"init": "pissa", "alpha": -3}, "alpha: expected a positive number with init 'pissa', received -3"),
        (
            {"init": "loftq", "quantize": "nf4", "alpha_pattern": {"0": 0}},
            "alpha: expected a positive number",
        ),
        (
            {"init": "loftq", "quantize": "nf4", "loftq_iterations": 0},
            "loftq_iterations: expected at least 1, received 0",
        ),
    ]:
        model = linear()
        with pytest.raises(ValueError, match=message):
            lora.apply(model, target_modules=["0"], **options)
        assert type(model[0]) is nn.Linear
        torch.testing.assert_close(model[0].weight, linear()[0].weight)
    model = lora.apply(linear(), rank=2, dora=True, target_modules=["0"])
    with pytest.raises(
        ValueError, match="dora: expected layers whose base no adapter changes, received 0 for both"
    ):
        lora.apply(model, rank=2, init="olora", target_modules=["0"], adapter_name="b")
    model = randomise(lora.apply(llama(), rank=2))
    with pytest.raises(
        ValueError,
        match="initialize_eva: model: expected lora_B of zeros, as before training, received other values",
    ):
        lora.initialize_eva(model, [])
    with pytest.raises(ValueError, match="expected linear layers with an adapter 'b', received none"):
        lora.initialize_eva(model, [], "b")
    model = lora.apply(llama(), rank=4)
    with pytest.raises(
        ValueError, match="batches: expected at least 8 directions in the inputs of .*, received 0"
    ):
        lora.initialize_eva(model, [])
