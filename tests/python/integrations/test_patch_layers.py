"""shoestring.patch replaces norms, rotary embeddings and MLPs of transformers models by fused operators."""

import copy
import io
from typing import Any

import pytest
import torch
from test_patch import batch, build
from torch import nn

import shoestring
from shoestring.integrations.transformers.layers import ROUNDS, fuse_mlps, fuse_norms

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Models with two layers. Each entry has: the options of the configuration; the number of norms; the number of
# attention modules with rotary embeddings; the number of gated MLPs; how the norms round.
MODELS: dict[str, tuple[dict[str, Any], int, int, int, str]] = {
    "Llama": ({}, 5, 2, 2, "upcast 'llama'"),
    "Mistral": ({}, 5, 2, 2, "upcast 'llama'"),
    "Qwen2": ({}, 5, 2, 2, "upcast 'llama'"),
    "Qwen3": ({}, 9, 2, 2, "upcast 'llama'"),
    "Gemma": ({}, 5, 2, 2, "upcast 'gemma', offset 1"),
    "Gemma2": ({}, 9, 2, 2, "upcast 'gemma', offset 1"),
    "Olmo2": ({}, 9, 2, 2, "upcast 'gemma'"),
    "GPT2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, 5, 0, 0, "LayerNorm"),
    "GPTNeoX": ({"rotary_pct": 0.5}, 5, 2, 0, "LayerNorm"),
    "Cohere": ({}, 0, 2, 2, ""),
}


def make(name: str, dtype: torch.dtype = torch.float32, **extra: Any) -> Any:
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, name + "Config")(**{**SMALL, **MODELS[name][0], **extra})
    kind = getattr(transformers, name + "ForCausalLM", None) or getattr(transformers, name + "LMHeadModel")
    model = kind(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.to(dtype).eval()


def patch_layers(model: Any) -> shoestring.PatchReport:
    return shoestring.patch(model, projections=False, attention=False)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_replaced_computes_the_same(name: str) -> None:
    model = make(name)
    plain = copy.deepcopy(model)
    kinds = [type(module) for module in model.modules()]
    report = patch_layers(model)
    whats = [change.what for change in report.changes]
    _, norms, rotations, mlps, how = MODELS[name]
    count = [sum(part in what for what in whats) for part in ("Norm", "rotary", "GLU")]
    assert count == [norms, rotations, mlps], str(report)
    assert all(how in what for what in whats if "Norm" in what)
    ids = batch()["input_ids"]
    ours, expected = model(ids).logits, plain(ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    for each in (model, plain):
        each(**batch_of(ids)).loss.backward()
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    largest = max(g.norm() for g in gradients.values())
    for n, p in model.named_parameters():
        assert (p.grad - gradients[n]).norm() <= 1e-4 * max(gradients[n].norm(), 0.1 * largest), n
    report.undo()
    assert [type(module) for module in model.modules()] == kinds


def batch_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_norms_round_as_the_models_do(name: str) -> None:
    """In bf16, at least 99 % of the elements of a fused norm equal those of the norm of transformers.

    All others differ by one rounding: there, the last bit of the fp32 value decides how it rounds.
    """
    model = make(name, torch.bfloat16)
    plain = copy.deepcopy(model)
    fuse_norms(model)
    x = torch.randn(4, 9, 64).bfloat16()
    ours, expected = model.model.norm(x), plain.model.norm(x)
    assert (ours != expected).double().mean() < 0.01
    assert ((ours - expected).abs() <= 2**-7 * expected.abs()).all()


@pytest.mark.parametrize("name", ["Llama", "Gemma", "GPTNeoX", "Cohere"])
def test_16_bits_are_no_worse(name: str) -> None:
    model = make(name, torch.bfloat16)
    plain = copy.deepcopy(model)
    ids = batch()["input_ids"]
    exact = copy.deepcopy(model).double()(ids).logits
    patch_layers(model)
    ours, eager = ((each(ids).logits.double() - exact).norm() for each in (model, plain))
    assert ours <= 1.2 * eager


def test_models_with_mixed_dtypes_keep_theirs() -> None:
    """With fp32 norms in a bf16 model, as PEFT makes them, fused and original norms give the same results."""
    model = make("Llama", torch.bfloat16)
    model.model.norm.float()
    plain = copy.deepcopy(model.model.norm)
    fuse_norms(model)
    x = torch.randn(3, 64).bfloat16()
    assert model.model.norm(x).dtype == plain(x).dtype == torch.float32 and torch.equal(
        model.model.norm(x), plain(x)
    )


def test_what_is_left_alone_says_why() -> None:
    model = make("Llama")

    class OtherRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    model.model.norm.__class__ = OtherRMSNorm
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    model.model.layers[1].self_attn.forward = model.model.layers[1].self_attn.forward
    report = patch_layers(model)
    text = str(report)
    assert "model.norm: left alone: a norm that computes something else" in text
    assert "model.layers.0.mlp: left alone: a forward of its own, parts besides, or an activation" in text
    assert "model.layers.1.self_attn: left alone: a forward of its own" in text
    assert len(report.left) == 3 and "model.layers.0.self_attn: fused rotary embedding" in text
    report.undo()
    assert type(model.model.norm) is OtherRMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_mlp_that_adds_little_stays(dtype: torch.dtype) -> None:
    """A forward that adds less than 1 % (2 % in bf16) of its result is another function, no rounding."""
    model = make("Llama", dtype)
    kind = type(model.model.layers[0].mlp)
    share = 1e-3 if dtype == torch.float32 else 0.02

    class Adds(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            return result + share * result.norm() / x.norm() * x

    model.model.layers[0].mlp.__class__ = Adds
    changes, left = fuse_mlps(model)
    assert [name for name, _ in left] == ["model.layers.0.mlp"]
    assert [name for name, *_ in changes] == ["model.layers.1.mlp"]


def test_options_are_switches() -> None:
    model = make("Llama")
    for option, part in (("norms", "Norm"), ("rope", "rotary"), ("mlp", "GLU")):
        report = shoestring.patch(model, projections=False, attention=False, **{option: False})
        assert part not in str(report) and len(report.changes) > 1
        report.undo()
    off = dict.fromkeys(("projections", "attention", "norms", "rope", "mlp", "linear", "embedding"), False)
    assert len(shoestring.patch(model, **off).changes) == 1


def test_copies_and_files_are_plain_and_hooks_run() -> None:
    model = make("Llama")
    kinds = [type(module) for module in model.modules()]
    # Patching also fuses projections, so some modules change their class twice.
    shoestring.patch(model)
    for other in (copy.deepcopy(model), torch.load(io.BytesIO(saved(model)), weights_only=False)):
        assert [type(module) for module in other.modules()] == kinds
        assert not any(key.startswith("_shoestring") for module in other.modules() for key in module.__dict__)
    seen: list[str] = []
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    model(batch()["input_ids"])
    assert seen == ["up", "norm"]


def saved(model: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


def test_generation_and_checkpointing() -> None:
    model = make("Llama")
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    ids = batch()["input_ids"]
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, do_sample=False),
        plain.generate(ids, max_new_tokens=5, do_sample=False),
    )
    model.gradient_checkpointing_enable()
    model.train()(**batch_of(ids)).loss.backward()
    plain.train()(**batch_of(ids)).loss.backward()
    expected = plain.model.layers[0].input_layernorm.weight.grad
    torch.testing.assert_close(
        model.model.layers[0].input_layernorm.weight.grad, expected, rtol=1e-3, atol=1e-5
    )


def test_less_is_kept_for_backward() -> None:
    """A fused MLP does not save silu(gate) for backward, which is (128, 512) in fp32 for each layer."""
    kept = []
    ids = torch.randint(3, 97, (2, 64))
    for patched in (False, True):
        model = make("Llama", intermediate_size=512).train()
        if patched:
            patch_layers(model)
        sizes: dict[int, int] = {}

        def note(t: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model.model(ids)
        kept.append(sum(sizes.values()))
    assert kept[0] - kept[1] >= 2 * 128 * 512 * 4


def test_compiled() -> None:
    model = build("Llama")
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    ids = batch()["input_ids"]
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def operators(run: Any) -> list[str]:
    """Return the names of the operators that ``run`` calls, in the order of the calls."""
    calls: list[str] = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(function.name())
            return function(*args, **(kwargs or {}))

    with Counting(), torch.no_grad():
        run()
    return calls


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"])
def test_residual_sums_join_the_norms(name: str) -> None:
    model = make(name)
    report = patch_layers(model)
    assert sum("residual sum" in change.what for change in report.changes) == 2, str(report)
    calls = operators(lambda: model(batch()["input_ids"]))
    assert sum("add_rms_norm" in call for call in calls) == 2, calls


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma", "GPTNeoX", "Cohere"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sample(4)
def test_under_autocast(name: str, dtype: torch.dtype) -> None:
    """Under autocast, patched layers use the fused operators and are as exact as the original ones."""
    model = make(name)
    plain = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    patch_layers(model)
    ids = batch()["input_ids"]
    with autocast(dtype):
        calls = operators(lambda: model(ids))
        hidden = model.model(ids).last_hidden_state
    assert sum("shoestring::rope" in call for call in calls) == 2, calls
    assert hidden.dtype == torch.float32
    for each in (model, plain):
        with autocast(dtype):
            loss = each(**batch_of(ids)).loss
        loss.backward()
    exact(**batch_of(ids)).loss.backward()
    wanted = {n: p.grad for n, p in exact.named_parameters()}
    ours, eager = (
        sum((p.grad.double() - wanted[n]).square().sum() for n, p in each.named_parameters()) ** 0.5
        for each in (model, plain)
    )
    assert ours <= 1.1 * eager
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2"])
def test_norms_round_for_linear_layers(name: str) -> None:
    """Under autocast, the norms before linear layers return bf16, and the logits have the same bits."""
    model = make(name)
    report = patch_layers(model)
    assert str(report).count("rounded once under autocast") == 2
    ids, seen = batch()["input_ids"], []
    for part in ("self_attn", "mlp"):
        getattr(model.model.layers[1], part).register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].dtype),
            with_kwargs=True,
        )
    with autocast():
        logits = model(ids).logits
        assert seen == [torch.bfloat16] * 2 and model.model(ids).last_hidden_state.dtype == torch.float32
        for module in model.modules():
            if ROUNDS in module.__dict__:
                module.__dict__[ROUNDS] = False
        assert torch.equal(model(ids).logits, logits)
    assert seen[4:] == [torch.float32] * 2
    report.undo()
    assert not any(ROUNDS in module.__dict__ for module in model.modules())


def test_norms_that_more_than_linear_layers_read() -> None:
    """A norm stays fp32 under autocast if its result is used besides in linear layers."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Reading(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x

    model = make("Llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = Reading
    report = str(patch_layers(model))
    assert "residual sum and norm together" in report and "rounded once" not in report


def test_compiled_under_autocast() -> None:
    model = make("Llama")
    patch_layers(model)
    ids = batch()["input_ids"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with autocast():
        torch.testing.assert_close(
            compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=0, atol=0
        )


def test_a_layer_that_does_more_is_left_alone() -> None:
    """shoestring.patch leaves layers with residual dropout alone, although eval mode skips the dropout."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Dropping(LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return nn.functional.dropout(super().forward(hidden_states, **kwargs), 0.5, self.training)

    model = make("Llama")
    model.model.layers[0].__class__ = Dropping
    model.model.layers[1].resid_dropout = nn.Dropout(0.1)
    report = patch_layers(model)
    assert not any("residual sum" in change.what for change in report.changes)
    assert any("add and normalise" in why for _, why in report.left)


def test_scales_of_a_residual_stay() -> None:
    """shoestring.patch leaves a layer alone that multiplies its residual by a trained weight, as in Doge.

    This weight starts at one, so the logits of a new model do not depend on it.
    """
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SMALL)).eval()
    ids = torch.randint(0, SMALL["vocab_size"], (2, 9))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_residual.uniform_(0.5, 2)
    model(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    report = shoestring.patch(model)
    assert "residual sum" not in str(report)
    model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (gradients[name] is None), name
        assert p.grad is None or (p.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-8, (
            name
        )


@pytest.mark.parametrize("how", ["module", "function"])
def test_a_dropout_within_an_mlp_stays(how: str) -> None:
    """shoestring.patch leaves an MLP with dropout alone.

    The MLP would pass the comparison with the fused MLP, because the comparison runs in eval mode.
    """
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))

    class Dropping(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return self.drop(y) if how == "module" else torch.nn.functional.dropout(y, 0.5, self.training)

    for layer in model.model.layers:
        layer.mlp.__class__ = Dropping
        if how == "module":
            layer.mlp.drop = torch.nn.Dropout(0.5)
    report = shoestring.patch(model)
    changed = [change.what for change in report.changes if change.where.endswith(".mlp")]
    assert all(what.startswith("linear layers") for what in changed), report
    assert sum("parts besides" in why for _, why in report.left) == SMALL["num_hidden_layers"]


def test_a_layer_norm_of_its_own_stays() -> None:
    """shoestring.patch does not replace the LayerNorm of Nemotron, which adds 1 to its weight."""
    model = transformers.NemotronForCausalLM(transformers.NemotronConfig(**SMALL))
    report = shoestring.patch(model)
    assert "fused LayerNorm" not in str(report)
    assert ("model.norm", "a LayerNorm that computes something else") in report.left


def test_a_decoder_alone() -> None:
    """shoestring.patch accepts a decoder without an encoder, because its check uses no key-value cache."""
    config = transformers.BartConfig(
        vocab_size=64,
        max_position_embeddings=64,
        d_model=32,
        decoder_layers=1,
        decoder_ffn_dim=48,
        decoder_attention_heads=4,
    )
    assert shoestring.patch(transformers.BartForCausalLM(config)).changes


# This test needs a new process, because other tests leave patched models behind.
@pytest.mark.fresh
def test_undo_leaves_no_name_in_the_model_file() -> None:
    """Patched models share one rotary function in transformers' module; undoing the last patch removes it."""
    first, second = make("Llama"), make("Llama")
    names = vars(transformers.models.llama.modeling_llama)
    reports = [shoestring.patch(model) for model in (first, second)]
    assert any(name.startswith("_shoestring") for name in names)
    reports[0].undo()
    second(**batch()).loss.backward()
    reports[1].undo()
    assert not any(name.startswith("_shoestring") for name in names)
