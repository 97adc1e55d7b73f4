"""Test nn.Attention against plain PyTorch and transformers, and with autocast, adapters, checkpointing."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from references.attention import attention_reference
from references.layers import rms_norm_reference, rope_reference
from relative_error import relative_error
from shoestring.nn import Attention

QWEN: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "causal": True}
# Each case has the options of the Attention module and the names of its inputs besides x.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "llama": ({"num_kv_heads": 2, "causal": True}, ("cos", "sin")),
    "qwen3": (QWEN, ("cos", "sin")),
    "gemma": (
        QWEN | {"norm_offset": 1.0, "softcap": 3.0, "scale": 0.3, "window_size": (3, -1)},
        ("cos", "sin", "position_ids"),
    ),
    "gpt_oss": (
        {"bias": True, "out_bias": True, "sinks": True, "window_size": (4, -1), "causal": True},
        ("cos", "sin"),
    ),
    "neighbours": ({"interleaved": True, "rotary_dim": 8, "num_kv_heads": 1}, ("cos", "sin")),
    "normed": ({"qk_norm": True, "value_dim": 8}, ("bias", "alibi_slopes")),
    "cross": ({"source_features": 24, "num_kv_heads": 2}, ("source",)),
    "packed": (QWEN, ("cos", "sin", "cu_seqlens_q")),
    "packed_cross": ({"qk_norm": True}, ("source", "cu_seqlens_q", "cu_seqlens_k")),
}


def make(case: str, dtype: torch.dtype = torch.float32) -> tuple[Attention, dict[str, Tensor]]:
    """Return an Attention module (4 heads, random norms and sinks) and inputs: 11 tokens of 64 features."""
    options, names = CASES[case]
    module = Attention(64, 4, **options)
    for name, p in module.named_parameters():
        nn.init.normal_(p, std=0.5 if name.endswith(("norm.weight", "sinks")) else 0.2)
    packed = "cu_seqlens_q" in names
    rows = () if packed else (2,)
    angles = torch.rand(11, options.get("rotary_dim", 16) // 2) * 6
    every = {
        "source": torch.randn(*rows, 9, options.get("source_features", 64)).to(dtype),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "position_ids": torch.randperm(11)[None],
        "bias": torch.randn(1, 4, 11, 11).to(dtype),
        "alibi_slopes": torch.rand(4),
        "cu_seqlens_q": torch.tensor([0, 4, 11], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 7, 9], dtype=torch.int32),
    }
    return module.to(dtype), {"x": torch.randn(*rows, 11, 64).to(dtype)} | {
        name: every[name] for name in names
    }


def plain(module: Attention, x: Tensor, source: Tensor | None = None, **given: Any) -> Tensor:
    """Compute the output of an Attention module with plain PyTorch, in the dtype of its weights."""
    packed = "cu_seqlens_q" in given
    other = x if source is None else source
    projected = zip(
        (x, other, other),
        (module.q_proj, module.k_proj, module.v_proj),
        (module.head_dim, module.head_dim, module.value_dim),
        strict=True,
    )
    q, k, v = (F.linear(t, p.weight, p.bias).unflatten(-1, (-1, dim)) for t, p, dim in projected)
    if module.q_norm is not None:
        options = {"eps": module.norm_eps, "offset": module.norm_offset}
        q, k = (
            rms_norm_reference(t, n.weight, **options) for t, n in ((q, module.q_norm), (k, module.k_norm))
        )
    if not packed:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if "cos" in given:
        turned = {"rotary_dim": module.rotary_dim, "interleaved": module.interleaved}
        q, k = rope_reference(
            q, k, given["cos"], given["sin"], position_ids=given.get("position_ids"), **turned
        )
    options = {name: getattr(module, name) for name in ("causal", "window_size", "softcap", "scale", "sinks")}
    options |= {name: t for name, t in given.items() if name not in ("cos", "sin", "position_ids")}
    out = attention_reference(q, k, v, **options).out
    return F.linear(
        (out if packed else out.transpose(1, 2)).flatten(-2), module.o_proj.weight, module.o_proj.bias
    )


def results(function: Any, module: Attention, inputs: dict[str, Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the module's output, and the gradients of x and of every parameter."""
    x = inputs["x"].clone().requires_grad_()
    y = function(x, **{name: t for name, t in inputs.items() if name != "x"})
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], upstream.to(y.dtype))]


@pytest.mark.first
@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_no_worse_than_a_plain_composition(case: str, dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("fp64 is for CPU tensors")
    module, inputs = make(case, dtype)
    upstream = torch.randn(inputs["x"].shape)
    ours = results(module, module, inputs, upstream)
    eager = results(lambda *a, **k: plain(module, *a, **k), module, inputs, upstream)
    wide = copy.deepcopy(module).double()
    exact_inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    exact = results(lambda *a, **k: plain(wide, *a, **k), wide, exact_inputs, upstream)
    floor = {torch.float64: 1e-13, torch.float32: 5e-7, torch.bfloat16: 3e-3}[dtype]
    names = ["y", "x", *(name for name, _ in module.named_parameters())]
    for name, a, b, c in zip(names, ours, eager, exact, strict=True):
        # The bias of the key projection adds the same number to all scores of a query, and softmax ignores
        # it. So the gradient of this bias is only rounding error.
        if c.norm() < 1e-6 * inputs["x"].numel():
            continue
        # The errors of a few elements vary more.
        factor = 2 if c.numel() >= 64 else 4
        assert relative_error(a, c) <= max(factor * relative_error(b, c), floor), name


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32,
}
THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": ({}, {"num_kv_heads": 2}),
    "Qwen2": ({}, {"num_kv_heads": 2, "bias": True}),
    "Qwen3": ({}, {"num_kv_heads": 2, "qk_norm": True}),
    "Gemma3": (
        {
            "model_type": "gemma3_text",
            "sliding_window": 5,
            "layer_types": ["sliding_attention"],
            "query_pre_attn_scalar": 9,
        },
        {"num_kv_heads": 2, "qk_norm": True, "norm_offset": 1.0, "scale": 1 / 3, "window_size": (4, -1)},
    ),
    "GptOss": (
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        {"num_kv_heads": 2, "bias": True, "out_bias": True, "sinks": True, "window_size": (4, -1)},
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_weights_and_results(name: str) -> None:
    """nn.Attention with a transformers model's weights replaces its attention, and logits stay equal."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    extra, options = THEIRS[name]
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, kind + "Config")(**{**SMALL, **extra}, attn_implementation="eager")
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    theirs = model.model.layers[0].self_attn
    module = Attention(64, 4, head_dim=16, causal=True, **options)
    module.load_state_dict(theirs.state_dict())

    class Within(nn.Module):
        def forward(self, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> tuple[Tensor, None]:
            cos, sin = position_embeddings
            return module(hidden_states, cos=cos, sin=sin), None

    ids = torch.randint(32, (2, 12))
    expected = model(ids).logits
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    model.model.layers[0].self_attn = Within()
    ours = model(ids).logits
    ours.backward(upstream)
    assert relative_error(ours, expected.detach()) < 2e-6
    for key, p in module.named_parameters():
        # The bias of the key projection adds the same number to all scores of a query, and softmax ignores
        # it. So the gradient of this bias is only rounding error.
        if gradients[key].norm() > 1e-4:
            assert relative_error(p.grad, gradients[key]) < 2e-5, key


def test_packed_sequences_are_what_each_is_alone() -> None:
    module, inputs = make("packed")
    y = module(**inputs)
    for begin, end in ((0, 4), (4, 11)):
        alone = module(
            inputs["x"][None, begin:end], cos=inputs["cos"][begin:end], sin=inputs["sin"][begin:end]
        )
        torch.testing.assert_close(y[begin:end], alone[0], rtol=1e-5, atol=1e-6)


def test_dropout_in_training_alone() -> None:
    module = Attention(64, 4, dropout_p=0.5)
    without = copy.deepcopy(module)
    without.dropout_p = 0.0
    x = torch.randn(2, 11, 64)
    assert torch.equal(module.eval()(x), without(x))
    module.train()
    torch.manual_seed(3)
    first = module(x)
    assert not torch.equal(first, module(x))
    torch.manual_seed(3)
    assert torch.equal(first, module(x))
    mean = torch.stack([module(x) for _ in range(2000)]).mean(0)
    assert relative_error(mean, without(x)) < 0.06


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_compiled(case: str) -> None:
    module, inputs = make(case)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    upstream = torch.randn(inputs["x"].shape)
    expected = results(module, module, inputs, upstream)
    for a, b in zip(results(compiled, module, inputs, upstream), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["qwen3", "gpt_oss", "cross"])
def test_autocast(case: str) -> None:
    """Under autocast the matrix products run in bf16, and parameters and their gradients stay in fp32."""
    module, inputs = make(case)
    upstream = torch.randn(inputs["x"].shape)
    expected = results(module, module, inputs, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        y, *gradients = results(module, module, inputs, upstream)
    assert y.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in gradients)
    for a, b in zip([y, *gradients], expected, strict=True):
        if b.norm() > 1e-4:
            assert relative_error(a, b) < 3e-2


@pytest.mark.parametrize("function", [shoestring.checkpoint, torch.utils.checkpoint.checkpoint])
def test_checkpointed(function: Any) -> None:
    """Activation checkpointing of nn.Attention changes no bit of its gradients, with dropout too."""
    module, inputs = make("qwen3")
    module.dropout_p = 0.3
    x, cos, sin = (inputs[name] for name in ("x", "cos", "sin"))
    extra = {} if function is shoestring.checkpoint else {"use_reentrant": False}
    gradients = []

    def plainly(x: Tensor) -> Tensor:
        return module(x, cos=cos, sin=sin)

    for call in (plainly, lambda x: function(plainly, x, **extra)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        gradients.append(torch.autograd.grad(call(leaf).square().sum(), [leaf, *module.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_copies_files_and_the_meta_device() -> None:
    module, inputs = make("gpt_oss")
    expected = module(**inputs)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert torch.equal(copy.deepcopy(module)(**inputs), expected)
    assert torch.equal(torch.load(buffer, weights_only=False)(**inputs), expected)
    options = CASES["gpt_oss"][0]
    empty = Attention(64, 4, **options, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in empty.parameters())
    assert empty(torch.randn(2, 3, 64, device="meta", dtype=torch.bfloat16)).shape == (2, 3, 64)
    empty = empty.float().to_empty(device="cpu")
    for part in empty.modules():
        getattr(part, "reset_parameters", lambda: None)()
    assert torch.equal(empty.sinks, torch.zeros(4)) and torch.isfinite(empty.q_proj.weight).all()
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty(**inputs), expected)
    with torch.device("meta"):
        assert Attention(64, 4, qk_norm=True).q_norm.weight.is_meta
    assert list(Attention(64, 4, qk_norm=True).state_dict()) == [
        f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ]


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_join_the_projections(quantize: str | None) -> None:
    module, inputs = make("llama")
    model = nn.ModuleDict({"attn": module})
    shoestring.lora.apply(
        model, rank=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], quantize=quantize
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    calls: list[str] = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting(), torch.no_grad():
        joined = module(**inputs)
    # One lora_linear call computes the query, key and value projections together, and a second one computes
    # the output projection.
    assert sum("lora_linear" in call for call in calls) == 2, calls
    module.q_proj.register_forward_hook(lambda *_: None)
    assert relative_error(joined, module(**inputs)) < 1e-5


def test_errors() -> None:
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads, 4, received 3"):
        Attention(64, 4, num_kv_heads=3)
    with pytest.raises(
        ValueError, match="head_dim: expected a number, as 64 features do not divide by 5 heads"
    ):
        Attention(64, 5)
    with pytest.raises(ValueError, match=r"dropout_p: expected a number in \[0, 1\), received 1"):
        Attention(64, 4, dropout_p=1)
    module, cross = Attention(64, 4), Attention(64, 4, source_features=24)
    x, table = torch.randn(2, 5, 64), torch.rand(5, 8)
    with pytest.raises(ValueError, match=r"x: expected \(batch, tokens, 64\), received \(2, 5, 63\)"):
        module(x[..., 1:])
    with pytest.raises(
        ValueError, match=r"x: expected \(tokens, 64\) with cu_seqlens_q, received \(2, 5, 64\)"
    ):
        module(x, cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(
        ValueError, match=r"source: expected \(batch, keys, 24\), received none, and x of 64 features"
    ):
        cross(x)
    with pytest.raises(ValueError, match=r"source: expected \(batch, keys, 24\), received \(2, 5, 64\)"):
        cross(x, x)
    with pytest.raises(ValueError, match="cos and sin: expected both"):
        module(x, cos=table)
    with pytest.raises(ValueError, match="cos and sin: expected both"):
        module(x, position_ids=torch.arange(5))
    with pytest.raises(ValueError, match="cos: expected None with a source"):
        module(x, x, cos=table, sin=table)
    with pytest.raises(RuntimeError, match="rope: cos: expected"):
        module(x, cos=table[1:], sin=table[1:])
