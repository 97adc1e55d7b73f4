"""Hugging Face models give the same results with shoestring's attention as with eager attention."""

import copy
import functools
from typing import Any

import pytest
import torch
from test_patch import MODELS, VOCAB, build
from torch import Tensor

import shoestring
from relative_error import relative_error
from shoestring.integrations.transformers.attention import _is_sliding
from shoestring.integrations.transformers.attention import mask as mask_of

transformers = pytest.importorskip("transformers")

# The models cover grouped queries, sliding windows of 5 tokens, softcap, sinks, learned positions, biases,
# and partial rotary embeddings.
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0, "num_hidden_layers": 2},
    "Qwen3": {"head_dim": 16},
    "GptOss": {
        "head_dim": 16,
        "sliding_window": 5,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "GPT2": {},
    "Phi": {},
    # Phimoe builds a mask with the sliding window, but its layers do not pass the window to the attention
    # function.
    "Phimoe": {"sliding_window": 5, "num_local_experts": 4},
}


def pair(name: str) -> tuple[Any, Any]:
    """Return a model with eager attention, and a copy of it with shoestring's attention."""
    MODELS.setdefault(name, {})
    eager = build(name, **OPTIONS[name])
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(shoestring.register_attention())
    assert ours.config._attn_implementation == "shoestring"
    return eager, ours


def tokens() -> tuple[Tensor, Tensor]:
    """Return two sequences of 12 tokens and their padding mask. The first sequence is padded on the left."""
    seen = torch.ones(2, 12, dtype=torch.long)
    seen[0, :3] = 0
    return torch.randint(0, VOCAB, (2, 12)), seen


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_gradients(name: str) -> None:
    eager, ours = pair(name)
    ids, seen = tokens()
    for options in ({}, {"attention_mask": seen}):
        logits = [model(ids, **options).logits[0, 3:] for model in (eager, ours)]
        assert relative_error(logits[1], logits[0]) < 2e-6
        upstream = torch.randn_like(logits[0])
        for out, model in zip(logits, (eager, ours)):
            model.zero_grad()
            out.backward(upstream)
        gradients = dict(eager.named_parameters())
        # A gradient whose terms cancel, such as that of a router's bias, has rounding errors of the terms' size.
        total = sum(float(p.grad.norm()) ** 2 for p in gradients.values() if p.grad is not None) ** 0.5
        rounding = torch.finfo(torch.float32).eps * total
        for key, p in ours.named_parameters():
            if p.grad is not None and gradients[key].grad.norm() > 1e-4:
                expected = gradients[key].grad
                assert (p.grad - expected).norm() < 2e-5 * expected.norm() + rounding, key


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_generates_the_same(name: str) -> None:
    eager, ours = pair(name)
    ids, seen = tokens()
    for cache in (None, "static"):
        options = {
            "attention_mask": seen,
            "max_new_tokens": 6,
            "do_sample": False,
            "cache_implementation": cache,
        }
        a, b = (model.generate(ids, **options) for model in (eager, ours))
        assert torch.equal(a, b)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generates_with_a_window_and_a_cache_of_fixed_size(cache: str) -> None:
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(1, 64, (1, 11))
    options = dict(max_new_tokens=6, do_sample=False, cache_implementation=cache, disable_compile=True)
    model.set_attn_implementation("eager")
    expected = model.generate(ids, **options)
    model.set_attn_implementation(shoestring.register_attention())
    assert torch.equal(model.generate(ids, **options), expected)


def test_no_mask_of_tokens_by_tokens() -> None:
    """Masks for shoestring's attention are None or (batch, keys), never (tokens, tokens).

    The size of a sliding window is passed as the size of one dimension of an expanded view of the mask.
    """
    from transformers import masking_utils

    mask = functools.partial(mask_of, masking_utils)
    assert mask(2, 9, 9) is None
    assert mask(2, 1, 9, q_offset=8) is None
    padded = torch.ones(2, 9, dtype=torch.bool)
    assert mask(2, 9, 9, attention_mask=padded) is None
    padded[0, 0] = False
    found = mask(2, 9, 9, attention_mask=padded)
    assert found is not None and torch.equal(found, padded)
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    found = mask(2, 9, 9, mask_function=sliding, local_size=4)
    assert found is not None and found.shape == (0, 1, 9, 4, 1)
    found = mask(2, 9, 9, mask_function=sliding, local_size=4, attention_mask=padded)
    assert (
        found is not None
        and found.shape == (2, 1, 9, 4, 1)
        and found.stride(3) == 0
        and torch.equal(found[:, 0, :, 3, 0], padded)
    )
    # For chunked attention, and for queries that are not the last tokens, the mask is that of sdpa attention.
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    assert _is_sliding(sliding, 4, None) and not _is_sliding(chunks, 4, None)
    for padding in range(1, 4):
        chunks = masking_utils.chunked_causal_mask_function(4, torch.full((2,), padding))
        assert not _is_sliding(chunks, 4, None)
    assert mask(2, 3, 9).shape == (2, 1, 3, 9)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
@pytest.mark.sample(1)
def test_compiled_models_have_their_windows(name: str) -> None:
    """Compiled models pass the size of a sliding window as a number, without a mask of (tokens, tokens).

    The size comes from the configuration, because mask functions cannot be evaluated under torch.compile.
    """
    eager, ours = pair(name)
    ids, seen = tokens()
    for options in ({}, {"attention_mask": seen}, {"attention_mask": seen, "use_cache": False}):
        windows: list[list[int]] = []
        sizes: set[int] = set()

        def look(
            graph: torch.fx.GraphModule, _: Any, windows: list[list[int]] = windows, sizes: set[int] = sizes
        ) -> Any:
            for node in graph.graph.nodes:
                if str(node.target).removeprefix("shoestring.").removesuffix(".default") == "attention":
                    windows.append(node.kwargs["window_size"])
                    bias = node.args[3]
                    sizes.add(0 if bias is None else bias.meta["example_value"].numel())
            return graph

        torch._dynamo.reset()
        logits = torch.compile(ours, backend=look)(ids, **options).logits
        assert relative_error(logits[0, 3:], eager(ids, **options).logits[0, 3:]) < 2e-6
        layers = ours.config.num_hidden_layers
        assert (
            len(windows) == layers
            and [4, -1] in windows
            and ((name == "Mistral") == ([-1, -1] not in windows))
        ), windows
        assert sizes == ({2 * 12} if options else {0})


def test_compiled_chunks_are_no_windows() -> None:
    """Under torch.compile, the configuration distinguishes a sliding window from chunks of the same size."""
    from types import SimpleNamespace

    sliding, chunks, both = (
        {"sliding_window": 4},
        {"attention_chunk_size": 4},
        {"sliding_window": 4, "attention_chunk_size": 4},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        found = [
            _is_sliding(lambda *_: None, 4, SimpleNamespace(**config))
            for config in (sliding, chunks, both, {"sliding_window": 5})
        ]
    assert found == [True, False, False, False]


def test_packed_batch() -> None:
    """Sequences that are packed into one row give the same logits as each sequence alone."""
    _, ours = pair("Llama")
    lengths = [5, 9, 3]
    ids = torch.randint(0, VOCAB, (1, sum(lengths)))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    # Because the caller passes a mask, transformers does not build one of (tokens, tokens). A mask of one
    # element costs nothing.
    anything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    logits = ours(
        ids, position_ids=positions, attention_mask=anything, cu_seq_lens_q=starts, cu_seq_lens_k=starts
    ).logits
    begin = 0
    for n in lengths:
        assert relative_error(logits[:, begin : begin + n], ours(ids[:, begin : begin + n]).logits) < 2e-6
        begin += n


def test_packed_batch_of_a_layer_that_does_not_say_its_window() -> None:
    _, ours = pair("Phimoe")
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    anything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(
        TypeError, match="sliding_window: expected PhimoeAttention to pass it for packed sequences"
    ):
        ours(
            torch.randint(0, VOCAB, (1, 9)),
            attention_mask=anything,
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
        )


def test_a_changed_mask_is_refused() -> None:
    """shoestring's attention refuses a mask to which a layer has appended columns, as DeepSeek V4 does.

    The shape of the mask encodes the sliding window, so appending would change the window.
    """
    found = mask_of(
        transformers.masking_utils,
        1,
        9,
        9,
        local_size=4,
        mask_function=transformers.masking_utils.sliding_window_causal_mask_function(4),
    )
    assert found is not None
    q = torch.randn(1, 2, 9, 8)
    attend = shoestring.integrations.transformers.attention.attend
    assert attend(torch.nn.Module(), q, q, q, found)[0].shape == (1, 9, 2, 8)
    with pytest.raises(TypeError, match=r"attention_mask: expected \(batch, 1, 9, window, 1\)"):
        attend(torch.nn.Module(), q, q, q, torch.nn.functional.pad(found, (0, 3)))


def test_dropout_in_training() -> None:
    _, ours = pair("Llama")
    ids, _ = tokens()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ours.train()
    torch.manual_seed(3)
    first = ours(ids).logits
    torch.manual_seed(3)
    assert torch.equal(first, ours(ids).logits) and not torch.equal(first, ours(ids).logits)


def test_patch_sets_it_and_takes_it_back() -> None:
    model = build("Llama")
    before = model.config._attn_implementation
    report = shoestring.patch(model)
    assert model.config._attn_implementation == "shoestring" and "attention of shoestring in place of" in str(
        report
    )
    report.undo()
    assert model.config._attn_implementation == before
    shoestring.patch(model, attention=False)
    assert model.config._attn_implementation == before


def test_refuses_what_it_does_not_know() -> None:
    """shoestring's attention refuses unknown tensor arguments, for example sinks with a value per query."""
    q = torch.randn(1, 2, 9, 8)
    attend = shoestring.integrations.transformers.attention.attend
    assert attend(torch.nn.Module(), q, q, q, None, position_ids=torch.arange(9))[0].shape == (1, 9, 2, 8)
    with pytest.raises(
        TypeError,
        match=r"attention: sinks: expected no such tensor, received one of \(1, 2, 9, 1\) from Module",
    ):
        attend(torch.nn.Module(), q, q, q, None, sinks=torch.zeros(1, 2, 9, 1))


def test_patch_leaves_attention_that_works_with_another_mask() -> None:
    """shoestring.patch keeps BigBirdPegasus attention, which has is_causal=False but a causal mask."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=97,
        d_model=64,
        decoder_layers=1,
        decoder_ffn_dim=96,
        decoder_attention_heads=4,
        max_position_embeddings=64,
    )
    model = transformers.BigBirdPegasusForCausalLM(config)
    report = shoestring.patch(model)
    assert model.config._attn_implementation == "eager" and report.changes
    assert any("attention that makes something else of its masks" in why for _, why in report.left)


def test_refuses_a_paged_cache() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match="cache: expected no paged cache"):
        shoestring.integrations.transformers.attention.attend(
            torch.nn.Module(), q, q, q, None, cache=object()
        )
