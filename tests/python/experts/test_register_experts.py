"""Test transformers' mixtures of experts with ``experts_implementation="shoestring"`` against the eager one."""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from relative_error import relative_error
from shoestring.adapters.experts import LowRankSum
from shoestring.integrations.transformers import experts as ours
from shoestring.integrations.transformers.experts import Gate, gate_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

VOCAB = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEP = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "norm_topk_prob": True},
    "Qwen2Moe": {"num_experts": 8, "shared_expert_intermediate_size": 24},
    "Olmoe": {"num_experts": 8},
    "Mixtral": {"num_local_experts": 8},
    "GptOss": {"num_local_experts": 8},
    "Glm4Moe": DEEP,
    "DeepseekV3": DEEP | LATENT | {"num_key_value_heads": 4, "head_dim": None},
}


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """Return a model with eager experts, and a copy of it with shoestring's."""
    transformers.logging.set_verbosity_error()
    options = {key: value for key, value in (SMALL | MODELS[name]).items() if value is not None}
    config = getattr(transformers, name + "Config")(**options)
    eager = getattr(transformers, name + "ForCausalLM")(config).to(dtype)
    for p in eager.parameters():
        nn.init.normal_(p, std=0.2)
    eager.set_experts_implementation("eager")
    eager.set_attn_implementation("eager")
    switched = copy.deepcopy(eager)
    switched.set_experts_implementation(shoestring.register_experts())
    return eager, switched


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (2, 24))


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that names the operators which the experts call from now on."""
    names: list[str] = []
    for name in ("run_stacks", "grouped_experts"):
        function = getattr(ours, name)

        def counted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            names.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(ours, name, counted)
    return names


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_logits_and_gradients_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, switched = pair(name)
    calls = calls_of(monkeypatch)
    ids = tokens()
    losses = [model(ids, labels=ids).loss for model in (eager, switched)]
    assert calls == ["run_stacks"] * (1 if "first_k_dense_replace" in MODELS[name] else 2)
    assert relative_error(losses[1], losses[0]) < 1e-6  # norms, routers and the loss compute in fp32
    for loss in losses:
        loss.backward()
    gradients = dict(eager.named_parameters())
    for key, p in switched.named_parameters():
        expected = gradients[key].grad
        assert (p.grad is None) == (expected is None), key
        if expected is not None and expected.norm() > 1e-9:
            assert relative_error(p.grad, expected) < 1e-5, key


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_training_has_the_losses_of_eager(name: str) -> None:
    """The rounding of a step grows with the steps; one choice of another expert would change a loss by more."""
    models = pair(name)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
    for _ in range(20):
        ids, losses = tokens(), []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# Classes of experts with their configurations; the gate of moe_experts, or None for the module's own gate.
SIZES = {"hidden_size": 16, "moe_intermediate_size": 12, "intermediate_size": 12, "hidden_act": "silu"}
COUNTS = {"num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "num_experts": 6}
CLASSES: dict[str, tuple[str, dict[str, Any], Gate | None]] = {
    "silu": ("mixtral.MixtralExperts", {}, Gate("silu", None, False)),
    "gelu": ("mixtral.MixtralExperts", {"hidden_act": "gelu"}, Gate("gelu", None, False)),
    "gelu_tanh": (
        "mixtral.MixtralExperts",
        {"hidden_act": "gelu_pytorch_tanh"},
        Gate("gelu_tanh", None, False),
    ),
    "quick gelu": ("mixtral.MixtralExperts", {"hidden_act": "quick_gelu"}, None),
    "gpt-oss": (
        "gpt_oss.GptOssExperts",
        {"swiglu_alpha": 1.702, "swiglu_limit": 0.75},
        Gate("swigluoai", 0.75, True),
    ),
    "another alpha": ("gpt_oss.GptOssExperts", {"swiglu_alpha": 1.5, "swiglu_limit": 0.75}, None),
    "clamped silu": ("deepseek_v4.DeepseekV4Experts", {"swiglu_limit": 0.5}, Gate("silu", 0.5, False)),
    "transposed": ("aria.AriaExperts", {}, Gate("silu", None, False)),
    "halves with biases": (
        "openai_privacy_filter.OpenAIPrivacyFilterExperts",
        {"swiglu_alpha": 1.702, "swiglu_limit": 0.75},
        Gate("swigluoai", 0.75, False),
    ),
    "no gate": (
        "nemotron_h.NemotronHExperts",
        {"mlp_hidden_act": "relu2", "moe_latent_size": None},
        None,
    ),
    "post norm": ("muse_spark.MuseSparkExperts", {"moe_hidden_size": 16, "post_norm_eps": 1e-5}, None),
}


# The class with biases computes in fp32 whatever its dtype, as does the norm.
TOLERANCES = {"halves with biases": 1e-5, "post norm": 1e-5}


def experts_of(case: str) -> Any:
    path, options, _ = CLASSES[case]
    room, name = path.split(".")
    try:
        module = importlib.import_module(f"transformers.models.{room}.modeling_{room}")
    except ImportError:
        pytest.skip(f"this transformers has no {room}")
    config = SimpleNamespace(**SIZES | COUNTS | options, _experts_implementation="eager")
    experts = getattr(module, name)(config).double()
    for p in experts.parameters():
        nn.init.normal_(p, std=0.4)
    return experts


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the experts of each and their weights. Expert 4 has no token."""
    index = torch.rand(30, 6).argsort(-1)
    index = torch.where(index == 4, 5, index)[:, :2]
    index = torch.where((index[:, :1] == index[:, 1:]) & (torch.arange(2) == 1), 0, index)
    return torch.randn(30, 16, dtype=dtype), index, torch.rand(30, 2, dtype=dtype)


def results(experts: Any, implementation: str, x: Tensor, index: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the output of experts and the gradients of all inputs and parameters."""
    experts.config._experts_implementation = implementation
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = experts(x, index, weight)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad(y, [x, weight, *experts.parameters()], upstream, allow_unused=True)]


@pytest.mark.parametrize("case", CLASSES)
def test_every_layout_and_gate(case: str) -> None:
    experts = experts_of(case)
    shoestring.register_experts()
    if case not in ("no gate", "post norm"):
        assert gate_of(experts) == CLASSES[case][2]
    given = inputs()
    tolerance = TOLERANCES.get(case, 1e-12)
    for found, expected in zip(
        results(experts, "shoestring", *given), results(experts, "eager", *given), strict=True
    ):
        assert found.dtype == expected.dtype
        assert relative_error(found, expected) < tolerance


@pytest.mark.parametrize("case", ["silu", "gpt-oss", "no gate", "post norm"])
def test_an_index_of_another_process_is_no_expert(case: str) -> None:
    experts = experts_of(case)
    shoestring.register_experts()
    x, index, weight = inputs()
    index[3:9, 1], index[5] = 6, 6
    found = results(experts, "shoestring", x, index, weight)
    tolerance = TOLERANCES.get(case, 1e-12)
    present = (index < 6).to(weight.dtype)
    known = results(experts, "shoestring", x, index.clamp(max=5), weight * present)
    assert found[0][5].abs().sum() == 0
    assert relative_error(found[0], known[0]) < tolerance
    assert found[2][index == 6].abs().sum() == 0
    for f, k in zip(found[3:], known[3:], strict=True):
        assert relative_error(f, k) < tolerance


@pytest.mark.parametrize("case", ["silu", "quick gelu", "transposed"])
def test_autocast_gives_the_dtype_of_the_tokens(case: str) -> None:
    experts = experts_of(case).float()
    shoestring.register_experts()
    given = inputs(torch.float32)
    expected = results(experts, "shoestring", *given)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(experts, "shoestring", *given)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == torch.float32
        assert 0 < relative_error(f, e) < 2e-2  # a few roundings to bf16, of 2**-9 each


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_adapters_on_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters have the results of eager, and no dense sum of a stack is computed."""
    eager, switched = pair(name)
    targets = ["gate_up_proj", "down_proj"]
    for model in (eager, switched):
        shoestring.lora.apply(model, rank=3, alpha=6, target_modules=[], target_parameters=targets)
    generator = torch.Generator().manual_seed(3)
    pairs = list(zip(eager.named_parameters(), switched.parameters(), strict=True))
    for (key, p), q in pairs:
        if "lora_" in key:
            value = 0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.data.copy_(value), q.data.copy_(value)
    calls = calls_of(monkeypatch)
    ids = tokens()
    eager_loss = eager(ids, labels=ids).loss
    eager_loss.backward()
    monkeypatch.setattr(LowRankSum, "dense", lambda _: pytest.fail("the dense sum was computed"))
    loss = switched(ids, labels=ids).loss
    assert calls == ["run_stacks"] * 2
    loss.backward()
    assert relative_error(loss, eager_loss) < 1e-6
    for (key, p), q in pairs:
        assert (p.grad is None) == (q.grad is None) == ("lora_" not in key)
        if p.grad is not None:
            assert relative_error(q.grad, p.grad) < 1e-5, key


def test_patch_switches_experts_and_undo_restores_them() -> None:
    eager, _ = pair("Qwen3Moe", torch.float32)
    ids = tokens()
    expected = eager(ids, labels=ids).loss
    report = shoestring.patch(eager)
    assert eager.config._experts_implementation == "shoestring"
    assert "experts of shoestring" in str(report)
    assert relative_error(eager(ids, labels=ids).loss, expected) < 1e-5
    report.undo()
    assert eager.config._experts_implementation == "eager"
    shoestring.patch(eager, experts=False)
    assert eager.config._experts_implementation == "eager"


def test_a_copy_with_another_gate_is_tried_again() -> None:
    experts = experts_of("clamped silu")
    assert gate_of(experts) == Gate("silu", 0.5, False)
    changed = copy.deepcopy(experts)
    changed.limit = 0.25
    assert gate_of(changed) == Gate("silu", 0.25, False)
