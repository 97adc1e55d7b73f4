"""Packed batches are nearly full, and have the same loss and gradients as separate sequences."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_patch import VOCAB, build

import shoestring
from relative_error import relative_error
from shoestring.data.batches import Examples, packed_arguments
from shoestring.data.packing import MultipackBatchSampler, PackedOrder, PackingCollator
from shoestring.training.run.models import can_pack, fused_loss


def lengths(count: int) -> torch.Tensor:
    """Return random sequence lengths like those of texts: most are short, a few have up to 2048 tokens."""
    return (torch.randn(count).mul(0.9).exp() * 120).long().clamp(1, 2048)


def test_first_fit_decreasing() -> None:
    sizes = lengths(3000)
    bins = torch.ops.shoestring.pack_sequences(sizes, 2048)
    filled = torch.zeros(int(bins.max()) + 1, dtype=torch.int64).index_add(0, bins, sizes)
    assert filled.max() <= 2048 and (filled > 0).all()
    # The number of free tokens in each bin (row of a packed batch), computed by first-fit decreasing in plain
    # Python.
    room: list[int] = []
    for i in sizes.argsort(descending=True, stable=True).tolist():
        size = int(sizes[i])
        place = next((b for b, left in enumerate(room) if left >= size), len(room))
        room += [2048] * (place == len(room))
        room[place] -= size
        assert int(bins[i]) == place
    assert torch.ops.shoestring.pack_sequences(torch.empty(0, dtype=torch.int64), 8).numel() == 0
    torch.library.opcheck(torch.ops.shoestring.pack_sequences.default, (sizes[:9], 2048))


def test_an_epoch_has_every_sequence_once_and_little_waste() -> None:
    sampler = MultipackBatchSampler(lengths(20000), 2048, seed=3)
    first = list(sampler)
    assert sorted(i for batch in first for i in batch) == list(range(20000)) and len(sampler) == len(first)
    assert all(int(sampler.lengths[batch].sum()) <= 2048 for batch in first)
    assert sampler.efficiency() > 0.99  # without sorting by length, about 0.93 of each batch would be filled
    assert list(sampler) == first and list(MultipackBatchSampler(sampler.lengths, 2048, seed=3)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_processes_share_an_epoch() -> None:
    sizes = lengths(999)
    parts = [list(MultipackBatchSampler(sizes, 2048, num_replicas=3, rank=rank)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    indices = [i for part in parts for batch in part for i in batch]
    assert len(indices) == len(set(indices)) > 900


def test_filled_batches_depend_on_the_step_alone(seed: int) -> None:
    """Each pass uses every example once, in other batches; steps may be asked for in any order."""
    lengths = torch.randint(1, 40, (57,)).tolist()
    order = PackedOrder(lengths, 64, 2, seed)
    steps = [order.step(step) for step in range(60)]
    batches = [batch for step in steps for batch in step]
    assert all(len(step) == 2 for step in steps)
    assert max(sum(lengths[i] for i in batch) for batch in batches) <= 64
    passes, seen = [], list[int]()
    for batch in batches:
        seen += batch
        if len(seen) == len(lengths):
            passes.append(seen)
            seen = []
    assert len(passes) > 1 and all(sorted(each) == list(range(57)) for each in passes)
    assert passes[0] != passes[1]
    for step in (59, 0, 31):
        assert PackedOrder(lengths, 64, 2, seed).step(step) == order.step(step) == steps[step]


def test_refusals() -> None:
    with pytest.raises(
        RuntimeError, match="pack_sequences: lengths: expected 1 to 8 tokens, received 9 for sequence 1"
    ):
        list(MultipackBatchSampler([3, 9], 8))
    with pytest.raises(ValueError, match="rank: expected 0 to 1, received 2"):
        MultipackBatchSampler([3], 8, num_replicas=2, rank=2)
    with pytest.raises(RuntimeError, match="capacity: expected"):
        torch.ops.shoestring.pack_sequences(torch.tensor([1]), 0)
    with pytest.raises(ValueError, match="PackingCollator: labels: expected one label for each"):
        PackingCollator()([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(
        ValueError, match="attention_mask: expected sequences without padding, received zeros in sequence 1"
    ):
        PackingCollator()(
            [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [1, 0], "attention_mask": [1, 0]}]
        )
    for name in ("assistant_masks", "completion_mask"):
        with pytest.raises(ValueError, match=f"{name}: expected labels that are -100 where it is 0"):
            PackingCollator()([{"input_ids": [1, 2], name: [0, 1]}])
        PackingCollator()([{"input_ids": [1, 2], "labels": [-100, 2], name: [0, 1]}])


def test_accelerate_sets_the_epoch_of_a_sampler_that_it_divides() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    pytest.importorskip("accelerate").PartialState(cpu=True)
    sampler = MultipackBatchSampler([9 + i % 20 for i in range(40)], capacity=64)
    loader = torch.utils.data.DataLoader(range(40), batch_sampler=sampler, collate_fn=list)
    mine = data_loader.prepare_data_loader(
        loader, num_processes=2, process_index=0, put_on_device=False, even_batches=False
    )
    first, second = list(mine), list(mine)
    assert first != second
    sampler.set_epoch(1)
    assert second == list(sampler)[: 2 * len(second) : 2]


@pytest.mark.parametrize("patched", [True, False])
def test_loss_and_gradients_are_those_of_the_sequences(patched: bool) -> None:
    packed = build()
    alone = copy.deepcopy(packed)
    if patched:
        shoestring.patch(packed)
    else:
        packed.set_attn_implementation(shoestring.register_attention())
    sequences: list[dict[str, Any]] = [
        {"input_ids": torch.randint(0, VOCAB, (n,)).tolist()} for n in (9, 4, 14, 1)
    ]
    loss = packed(**PackingCollator()(sequences)).loss
    loss.backward()
    total, count = torch.zeros(()), 0
    for sequence in sequences:
        ids = torch.tensor(sequence["input_ids"])[None]
        if ids.size(1) > 1:
            total = total + alone(ids, labels=ids).loss * (ids.size(1) - 1)
            count += ids.size(1) - 1
    (total / count).backward()
    assert relative_error(loss, total / count) < 1e-6
    for ours, theirs in zip(packed.parameters(), alone.parameters()):
        assert theirs.grad is not None and relative_error(ours.grad, theirs.grad) < 2e-5


def test_packed_examples_train_as_padded_ones() -> None:
    """Packed examples of different lengths give the same loss and gradients as padded ones.

    ``shoestring finetune`` uses packed batches if the model supports them, and otherwise padded ones.
    """
    model = build()
    assert not can_pack(model)
    loss = fused_loss(model, 8)
    assert can_pack(model)
    sizes = [9, 4, 14, 2]
    starts = np.cumsum([0, *sizes])
    tokens = torch.randint(0, VOCAB, (int(starts[-1]),)).numpy().astype(np.uint32)
    examples = Examples(tokens, torch.rand(len(tokens)).numpy() < 0.7, starts, np.arange(4), pad=0)
    results = []
    for inputs, labels, more in ((*examples.rows([2, 0, 3, 1]), {}), examples.packed([2, 0, 3, 1])):
        model.zero_grad()
        value = loss(inputs, labels, **more)
        value.backward()
        results.append((value.detach(), [p.grad.clone() for p in model.parameters()]))
        assert inputs.shape == ((4, 13) if not more else (1, sum(sizes) - 4))
    assert relative_error(results[1][0], results[0][0]) < 1e-6
    for packed, padded in zip(results[1][1], results[0][1], strict=True):
        assert relative_error(packed, padded) < 2e-5


def test_what_cannot_keep_sequences_apart_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """can_pack() is false for a model that does not pass the sequence boundaries on to its attention."""
    model = build()
    fused_loss(model, 8)
    forward = type(model).forward

    def deaf(
        self: Any, *args: Any, cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None, **kwargs: Any
    ) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", deaf)
    assert not can_pack(model)


# Fields of the smallest configurations, of which each architecture takes those that it knows.
TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "n_embd": 64, "n_layer": 2, "n_head": 4, "max_position_embeddings": 128,
    "n_positions": 128, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mamba_d_state": 8, "mamba_dt_rank": 8,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_ssm": 128, "lru_width": 64,
    "attention_window_size": 8, "sliding_window": 8, "block_dim": 64, "conv_dim": 64, "conv_dim_out": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "block_size": 8, "word_embed_proj_dim": 64, "ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"layer_types": ["conv", "full_attention"] * 2}
# architectures of which no row may have several examples, because a state or a convolution crosses them
STATES: dict[str, dict[str, Any]] = {
    "falcon_h1": {}, "lfm2": MIXED, "lfm2_moe": MIXED | {"num_dense_layers": 1}, "recurrent_gemma": {}, "jamba": {},
    "bamba": {}, "minimax": {}, "qwen3_next": {}, "mamba": {}, "rwkv": {}, "bloom": {"hidden_size": 64},
}  # fmt: skip
# architectures whose tokens meet in attention alone
ATTENTION = ("llama", "gpt2", "opt", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss", "granite", "olmo2")


def smallest(kind: str, **fields: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    known = transformers.AutoConfig.for_model(kind).to_dict()
    chosen = {name: value for name, value in TINY.items() if name in known} | fields
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.sample(5)
def test_examples_that_meet_in_a_state_are_padded(kind: str, dtype: torch.dtype) -> None:
    model = smallest(kind, **STATES[kind]).to(dtype)
    fused_loss(model, 8)
    assert not can_pack(model)


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.sample(4)
def test_examples_that_meet_nowhere_are_packed(kind: str) -> None:
    """Weights that are scaled up show what small ones hide."""
    model = smallest(kind).eval()
    fused_loss(model, 8)
    assert can_pack(model) and can_pack(copy.deepcopy(model).bfloat16())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    sizes = [17, 12, 11]
    tokens = torch.randint(0, 64, (1, sum(sizes)))
    with torch.no_grad():
        alone = [model(part, use_cache=False).logits for part in tokens.split(sizes, 1)]
        packed = model(tokens, use_cache=False, **packed_arguments(sizes)).logits
    assert relative_error(packed, torch.cat(alone, 1)) < 1e-5
