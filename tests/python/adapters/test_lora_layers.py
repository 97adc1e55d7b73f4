"""Test adapters on embeddings, convolutions and stacked expert weights."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lora_models import assert_files_agree, llama, logits, randomise
from shoestring import lora
from shoestring.adapters.experts import LowRankSum


class Net(nn.Module):
    """A model that consists of a single layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding": (lambda: nn.Embedding(11, 6), lambda: torch.randint(11, (4, 5))),
    "conv1d": (lambda: nn.Conv1d(5, 7, 3, stride=2, padding=1), lambda: torch.randn(4, 5, 9)),
    "conv2d": (lambda: nn.Conv2d(5, 7, (3, 2), padding=(1, 0)), lambda: torch.randn(4, 5, 6, 7)),
    "conv2d of 1": (lambda: nn.Conv2d(5, 7, 1, bias=False), lambda: torch.randn(4, 5, 3, 4)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 2), lambda: torch.randn(4, 3, 4, 3, 5)),
}


def net(kind: str) -> Net:
    torch.manual_seed(4)
    return Net(LAYERS[kind][0]())


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", LAYERS)
def test_starts_as_peft_and_files_agree(kind: str, dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["layer"], use_dora=dora, use_rslora=True)
    torch.manual_seed(8)
    ours = lora.apply(net(kind), config)
    theirs = peft.get_peft_model(net(kind), config).eval()
    mine, peers = (
        sorted((n.split(".default")[0], p) for n, p in m.named_parameters() if p.requires_grad)
        for m in (ours, theirs)
    )
    x = LAYERS[kind][1]()
    torch.testing.assert_close(ours(x), theirs(x))
    for (name, a), (other, b) in zip(mine, peers, strict=True):
        assert "base_model.model." + name == other and a.shape == b.shape
        torch.testing.assert_close(a, b)
        a.data += 0.2 * torch.randn_like(a)
        b.data.copy_(a)
    y = ours(x)
    assert (y - net(kind)(x)).abs().max() > 1e-2
    torch.testing.assert_close(y, theirs(x), rtol=1e-6, atol=1e-6)
    up = torch.randn_like(y)
    leaves = [[p for _, p in group] for group in (mine, peers)]
    for a, b in zip(*(torch.autograd.grad(m(x), p, up) for m, p in zip((ours, theirs), leaves)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    lora.save_adapter(ours, tmp_path / "ours")
    loaded = peft.PeftModel.from_pretrained(net(kind), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(loaded(x), y, rtol=1e-6, atol=1e-6)
    loaded.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    torch.testing.assert_close(lora.load_adapter(net(kind), tmp_path / "theirs")(x), y, rtol=1e-6, atol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("kind", LAYERS)
def test_merged_by_row_and_copied(kind: str) -> None:
    options = {} if kind == "embedding" else {"lora_bias": True}
    model = lora.apply(net(kind), rank=3, target_modules=["layer"], **options)
    lora.apply(model, rank=2, target_modules=["layer"], dora=True, adapter_name="b")
    randomise(randomise(model), "b")
    x, alone = LAYERS[kind][1](), {None: net(kind)(LAYERS[kind][1]()[:0])}
    alone[None] = net(kind)(x)
    for name in ("default", "b"):
        lora.set_adapter(model, name)
        alone[name] = model(x)
        torch.testing.assert_close(copy.deepcopy(model)(x), alone[name])
        merged = copy.deepcopy(model)
        lora.merge(merged)
        assert type(merged.layer) is type(net(kind).layer)
        torch.testing.assert_close(merged(x), alone[name], rtol=1e-4, atol=1e-5)
        lora.unmerge(merged)
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in merged.state_dict().items())
    lora.set_adapter(model, ["default", "b"])
    total = alone["default"] + alone["b"] - alone[None]
    torch.testing.assert_close(model(x), total, rtol=1e-4, atol=1e-5)
    with lora.adapters_per_row(model, ["b", None, "default", "b"]):
        mixed = model(x)
    for row, name in enumerate(["b", None, "default", "b"]):
        torch.testing.assert_close(mixed[row], alone[name][row], rtol=1e-4, atol=1e-5)
    lora.merge(model)
    torch.testing.assert_close(model(x), total, rtol=1e-4, atol=1e-5)


@pytest.mark.device
def test_dilated_convolution_is_its_merged_weight() -> None:
    """A dilated convolution has the same output before and after its adapter is merged.

    No comparison with PEFT is possible, because PEFT ignores the dilation in lora_A.
    """
    torch.manual_seed(4)
    model = Net(nn.Conv1d(5, 7, 3, dilation=2, padding_mode="circular", padding=2))
    randomise(lora.apply(model, rank=2, target_modules=["layer"]))
    x = torch.randn(2, 5, 9)
    y = model(x)
    lora.merge(model)
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)


def test_embedding_of_a_language_model(tmp_path: Path) -> None:
    model = randomise(
        lora.apply(llama(), rank=4, alpha=8, target_modules=["embed_tokens", "q_proj"], quantize="nf4")
    )
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "LoraLinear"
    model = randomise(lora.apply(llama(), rank=4, alpha=8, target_modules=["embed_tokens", "q_proj"]))
    assert_files_agree(model, tmp_path)


def mixtral(implementation: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = implementation
    return transformers.MixtralForCausalLM(config).eval()


BOTH = ["experts.down_proj", "experts.gate_up_proj"]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_as_in_peft(implementation: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=BOTH)
    ours, theirs = (
        lora.apply(mixtral(implementation), config),
        peft.get_peft_model(mixtral(implementation), config).eval(),
    )
    prefix = "model.layers.0.mlp.experts."
    for name, own in {n: p for n, p in ours.named_parameters() if p.requires_grad}.items():
        own.data += 0.1 * torch.randn_like(own)
        other = "base_model.model." + name.replace("lora_A_", "").replace("lora_B_", "")
        # PEFT wraps the module once for each parameter; the outermost wrapper is that of down_proj
        if "experts" in name:
            inner = "base_layer." if "gate_up_proj" in name else ""
            other = "base_model.model." + name.split("lora_")[0] + inner + name.split(".")[-2][:6]
            other += ".default.weight"
        else:
            other += ".weight"
        theirs.get_parameter(other).data.copy_(own)
    assert f"{prefix}lora_A_gate_up_proj.default" in dict(ours.named_parameters())
    a, b = logits(ours), logits(theirs)
    assert (a - b).abs().max() <= 1e-6 and (a - logits(mixtral())).abs().max() > 1e-2
    ids = torch.randint(97, (2, 7))
    layer = ours.model.layers[0].mlp.experts
    peer = theirs.base_model.model.model.layers[0].mlp.experts
    pairs = [(layer.lora_A_gate_up_proj["default"], peer.base_layer.lora_A["default"].weight)]
    pairs += [(layer.lora_B_down_proj["default"], peer.lora_B["default"].weight)]
    for own, other in pairs:
        up, down = (
            torch.autograd.grad(m(ids, labels=ids).loss, p)[0] for m, p in ((ours, own), (theirs, other))
        )
        torch.testing.assert_close(up, down, rtol=1e-3, atol=1e-6)


def test_experts_in_files_merged_and_switched(tmp_path: Path) -> None:
    options = {
        "rank": 2,
        "target_modules": ["q_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {r"experts\.down_proj": 5, r"experts\..*": 3},
        "alpha_pattern": {"gate_up_proj": 7},
    }
    model = randomise(lora.apply(mixtral(), **options))
    for name, parameter in model.named_parameters():
        if "lora_B_" in name:
            parameter.data.normal_(std=0.1)
    expected = logits(model)
    assert_files_agree(model, tmp_path, mixtral)
    fresh = lora.apply(mixtral(), **options)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), expected) and torch.equal(logits(copy.deepcopy(model)), expected)
    with lora.disable_adapter(model):
        assert torch.equal(logits(model), logits(mixtral()))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    lora.merge(model)
    assert type(model.model.layers[0].mlp.experts) is type(mixtral().model.layers[0].mlp.experts)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    lora.apply(model, rank=1, target_modules=None, target_parameters=BOTH, adapter_name="b")
    for name, parameter in model.named_parameters():
        if name.endswith(".b") and "lora_B_" in name:
            parameter.data.normal_(std=0.1)
    lora.set_adapter(model, ["default", "b"])
    both = logits(model)
    assert (both - expected).abs().max() > 1e-3
    lora.merge(model)
    torch.testing.assert_close(logits(model), both, rtol=1e-4, atol=1e-5)


@pytest.mark.device
def test_a_stack_of_sums_is_its_dense_sum() -> None:
    base, left, right = torch.randn(4, 6, 5), torch.randn(4, 6, 2), torch.randn(4, 2, 5)
    stack, dense = LowRankSum(base, left, right), base + left @ right
    x = torch.randn(7, 5)
    index = torch.tensor([2, 0, 3])
    column = torch.randn(3, 5, 1)
    for ours, exact in [
        (nn.functional.linear(x, stack[2]), nn.functional.linear(x, dense[2])),
        (nn.functional.linear(x, stack[1], torch.ones(6)), nn.functional.linear(x, dense[1], torch.ones(6))),
        (x @ stack[0].transpose(0, 1), x @ dense[0].T),
        (torch.bmm(stack[index], column), torch.bmm(dense[index], column)),
        (torch.bmm(column.mT, stack[index].transpose(-2, -1)), torch.bmm(column.mT, dense[index].mT)),
        (stack.transpose(1, 2)[1] @ torch.ones(6), dense[1].T @ torch.ones(6)),
        (torch.relu(stack), torch.relu(dense)),
        (stack.sum(0), dense.sum(0)),
        (stack.transpose(0, 1), dense.transpose(0, 1)),
        (stack[:, 1], dense[:, 1]),
        (torch.matmul(stack[0], stack[1].T), dense[0] @ dense[1].T),
    ]:
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
    assert stack.shape == dense.shape and stack.dtype == dense.dtype


def test_experts_take_no_memory_of_the_stack() -> None:
    """Forward and backward of an adapter on experts allocate no tensor of the size of the stacked weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                self.elements = max(self.elements, result.numel())
            return result

    model = lora.apply(mixtral(), rank=2, target_modules=None, target_parameters=BOTH)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(3, 32, requires_grad=True)
    index, weights = torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.ones(3, 2)
    with Largest() as mode:
        experts(x, index, weights).sum().backward()
    stack = experts._parameters["gate_up_proj"].numel()
    assert mode.elements < stack / 4, (mode.elements, stack)
    assert experts.lora_B_gate_up_proj["default"].grad is not None


def test_errors() -> None:
    for model, options, message in [
        (
            net("embedding"),
            {"lora_bias": True},
            "expected lora_bias=False for an embedding, received layer, a Embedding",
        ),
        (Net(nn.Embedding(4, 2, max_norm=1.0)), {}, "expected an embedding without max_norm and sparse"),
        (
            Net(nn.Conv2d(4, 4, 1, groups=2)),
            {},
            "expected a convolution with groups=1, received layer, a Conv2d",
        ),
        (net("conv1d"), {"init": "pissa"}, "expected linear layers for 'pissa', received layer, a Conv1d"),
        (Net(nn.LSTM(2, 2)), {}, "target_modules: expected linear layers .* received layer, a LSTM"),
    ]:
        with pytest.raises(ValueError, match=message):
            lora.apply(model, rank=2, target_modules=["layer"], **options)
    for options, message in [
        (
            {"target_parameters": ["experts.nothing"]},
            "target_parameters: expected names of parameters, received 'experts.n",
        ),
        (
            {"target_parameters": ["norm.weight"]},
            r"expected dense weights of 2 or 3 dimensions or quantised stacks of experts, received model.norm.weight",
        ),
        (
            {"target_parameters": BOTH, "dora": True},
            "expected no dora and lora_bias with target_parameters",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            lora.apply(mixtral(), rank=2, target_modules=None, **options)
    model = lora.apply(mixtral(), rank=2, target_modules=None, target_parameters=BOTH)
    with pytest.raises(
        ValueError, match="config: expected adapters of the kind that .*experts has, LoraMixtralExperts"
    ):
        lora.apply(model, rank=2, target_modules=None, target_parameters=BOTH[:1], adapter_name="b")
