"""Test nn.MixtureOfDepths against a loop over tokens in fp64, and its choices, packed sequences and checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from relative_error import relative_error

FEATURES = 8


class Layer(nn.Module):
    """A layer of a decoder: causal attention with rotary embedding, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = shoestring.nn.Attention(FEATURES, 2, causal=True)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y: Tensor = x + self.attention(x, **options)
        return y


class PrefixSum(nn.Module):
    """Adds to each token the sum of the tokens up to it. Sums of small integers are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x[..., 0].detach().clone())
        return x + x.cumsum(-2)


def make(block: nn.Module, capacity: float = 0.3, **options: Any) -> Any:
    return shoestring.nn.MixtureOfDepths(block, FEATURES, capacity, **options).double()


def tables(tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(tokens).double(), torch.tensor([1.0, 0.3]).double())
    return angles.cos(), angles.sin()


def heaviest(weights: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(weights)), key=lambda t: (-weights[t], t))[:count])


def by_hand(mod: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Compute one sequence (tokens, features) token by token, with the rotary embedding of `positions`."""
    count = min(len(x), max(1, int(mod.capacity * len(x) + 0.5)))
    weights = [token @ mod.router for token in x]
    chosen = heaviest([w.item() for w in weights], count)
    cos, sin = tables(40)
    at = positions[chosen]
    out = mod.block(torch.stack([x[t] for t in chosen])[None], cos=cos[at], sin=sin[at])[0]
    rows = list(x)
    for i, t in enumerate(chosen):
        r = weights[t].sigmoid() if mod.score == "sigmoid" else weights[t]
        rows[t] = x[t] + r * (out[i] - x[t])
    return torch.stack(rows)


def check(mod: Any, x: Tensor, y: Tensor, expected: Tensor) -> None:
    assert relative_error(y, expected) < 1e-12
    of = [x, mod.router, *mod.block.parameters()]
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, of, upstream)
    wanted = torch.autograd.grad(expected, of, upstream)
    assert all(relative_error(f, w) < 1e-12 for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("score", ["linear", "sigmoid"])
def test_tokens_one_by_one(score: str) -> None:
    mod = make(Layer(), score=score)
    x = torch.randn(3, 11, FEATURES, dtype=torch.float64, requires_grad=True)
    first = torch.arange(11).expand(3, 11)
    others = 2 * first + torch.arange(3).unsqueeze(1)
    cos, sin = tables(40)
    for arguments, positions in (
        ({"cos": cos[:11], "sin": sin[:11]}, first),
        ({"cos": cos[others], "sin": sin[others]}, others),
        ({"cos": cos, "sin": sin, "position_ids": first[0]}, first),
        ({"cos": cos, "sin": sin, "position_ids": others}, others),
    ):
        y = mod(x, **arguments)
        check(mod, x, y, torch.stack([by_hand(mod, *each) for each in zip(x, positions, strict=True)]))
        assert mod.route.offsets.tolist() == [0, 3, 6, 9]
    unchosen = torch.ones(33, dtype=torch.bool).index_fill_(0, mod.route.index, False)
    assert torch.equal(y.flatten(0, 1)[unchosen], x.flatten(0, 1)[unchosen])


def test_packed_sequences_are_sequences() -> None:
    mod = make(Layer())
    x = torch.randn(13, FEATURES, dtype=torch.float64, requires_grad=True)
    lengths = [5, 1, 7]
    positions = [torch.arange(n) for n in lengths]
    cos, sin = tables(40)
    starts = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    y = mod(x, cos=cos, sin=sin, position_ids=torch.cat(positions), cu_seqlens_q=starts)
    check(
        mod, x, y, torch.cat([by_hand(mod, *each) for each in zip(x.split(lengths), positions, strict=True)])
    )
    assert isinstance(mod.route, shoestring.nn.DepthRoute)
    assert mod.route.offsets.tolist() == [0, 2, 3, 5]


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    model: Any = LlamaForCausalLM(config)
    layers = model.model.layers
    layers[1] = shoestring.nn.MixtureOfDepths(layers[1], 32, 0.25)
    nn.init.zeros_(layers[1].predictor_bias)  # else it outweighs the small initial states
    return model.double()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "shoestring"])
def test_layers_of_transformers_keep_positions(implementation: str) -> None:
    """The block is the layer of the chosen tokens alone, with their rotary tables."""
    model = llama()
    model.set_attn_implementation(shoestring.register_attention())
    layer = model.model.layers[1]
    tokens = torch.randint(64, (3, 16))
    states: dict[str, Tensor] = {}
    layer.register_forward_hook(lambda _, args, out: states.update(x=args[0], y=out))
    model.set_attn_implementation(implementation)
    model(tokens)
    x, y = states["x"], states["y"]
    assert layer.route.offsets.tolist() == [0, 4, 8, 12]
    model.set_attn_implementation("sdpa")
    for row in range(3):
        chosen = heaviest((x[row] @ layer.router).tolist(), 4)
        assert [16 * row + t for t in chosen] == layer.route.index[4 * row : 4 * row + 4].tolist()
        rows = x[row, chosen].unsqueeze(0)
        out = layer.block(rows, position_embeddings=model.model.rotary_emb(rows, torch.tensor([chosen])))
        expected = x[row].clone()
        weight = (rows @ layer.router).unsqueeze(-1)
        expected[chosen] = (rows + weight * (out - rows))[0]
        assert relative_error(y[row], expected) < 1e-6  # transformers computes rotary tables in fp32


def test_packed_rows_of_transformers() -> None:
    model = llama()
    model.set_attn_implementation(shoestring.register_attention())
    documents = [torch.randint(64, (1, n)) for n in (9, 2, 13)]
    starts = torch.tensor([0, 9, 11, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (9, 2, 13)])[None]
    packed = model(
        torch.cat(documents, 1),
        position_ids=positions,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=13,
        max_length_k=13,
    ).logits
    assert model.model.layers[1].route.offsets.tolist() == [0, 2, 3, 6]
    alone = torch.cat([model(each).logits for each in documents], 1)
    assert relative_error(packed, alone) < 1e-6


def test_padding_stays_masked() -> None:
    """Tokens in the padding are masked as keys, whatever they are."""
    model = llama().train()
    tokens, mask = torch.randint(64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    layer = model.model.layers[1]
    with torch.no_grad():
        layer.router.zero_()  # the first tokens, among them those of the padding
        layer.router[0] = 1e-9
    others = tokens.clone()
    others[1, :5] = (others[1, :5] + 7) % 64
    states = []
    layer.block.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: states.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for ids in (tokens, others):
        model(ids, attention_mask=mask)
        index = layer.route.index.view(2, 3) % 12
        expected = mask[1, index[1]].bool() & torch.ones(3, 3).tril().bool()
        assert torch.equal(states[-1][1, 0], expected)


@pytest.mark.parametrize(
    ("tokens", "capacity", "expected"),
    [
        (5, 0.4, [0, 1]),
        (5, 0.01, [0]),
        (5, 0.5, [0, 1, 2]),
        (3, 1.0, [0, 1, 2]),
        (30, 0.1, [0, 1, 2]),
        (0, 0.5, []),
    ],
)
def test_equal_tokens_and_rounding(tokens: int, capacity: float, expected: list[int]) -> None:
    mod = make(PrefixSum(), capacity)
    nn.init.zeros_(mod.router)
    y = mod(torch.ones(2, tokens, FEATURES, dtype=torch.float64))
    assert y.shape == (2, tokens, FEATURES)
    assert mod.route.index.tolist() == [*expected, *(tokens + t for t in expected)]


def integers(mod: nn.Module) -> None:
    with torch.no_grad():
        for p in mod.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))


@pytest.mark.parametrize("mode", ["eval", "predictor"])
def test_the_predictor_looks_at_no_later_token(mode: str) -> None:
    """All numbers are small integers, so that equal sums have equal bits."""
    mod = make(PrefixSum(), 0.25, choice="predictor" if mode == "predictor" else "auto")
    integers(mod)
    mod.train(mode == "predictor")
    x = torch.randint(-3, 4, (4, 12, FEATURES)).double()
    y = mod(x)
    wanted = (x @ mod.predictor + mod.predictor_bias) > 0
    assert mod.route.index.tolist() == wanted.flatten().nonzero().flatten().tolist()
    assert mod.route.offsets.diff().tolist() == wanted.sum(1).tolist()
    assert wanted.any() and mod.route.loss == 0
    for row in range(4):  # sequences of a batch do not see each other
        assert torch.equal(mod(x[row]), y[row])
    for t in range(12):
        changed = x.clone()
        changed[:, t:] = torch.randint(-3, 4, (4, 12 - t, FEATURES)).double()
        assert torch.equal(mod(changed)[:, :t], y[:, :t])


def test_no_token_is_chosen() -> None:
    mod = make(PrefixSum()).eval()
    nn.init.zeros_(mod.predictor)
    nn.init.constant_(mod.predictor_bias, -1)
    x = torch.randn(2, 5, FEATURES, dtype=torch.float64)
    assert torch.equal(mod(x), x) and mod.block.seen == []
    packed = mod(x[0], cos=None, cu_seqlens_q=torch.tensor([0, 2, 5]))
    assert torch.equal(packed, x[0])


def test_generation_with_a_cache_computes_the_same() -> None:
    model = llama().eval()
    tokens = torch.randint(64, (1, 20))
    whole = model(tokens, use_cache=False).logits
    chosen = model.model.layers[1].route.index
    assert 0 < chosen.numel() < 20
    start = model(tokens[:, :6], use_cache=True)
    steps, cache = [start.logits], start.past_key_values
    for t in range(6, 20):
        step = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
        steps.append(step.logits)
    assert relative_error(torch.cat(steps, 1), whole) < 1e-6
    assert cache.get_seq_length(0) == 20 and cache.get_seq_length(1) == chosen.numel()


def test_the_loss_of_the_predictor() -> None:
    mod = make(PrefixSum(), 0.25)
    x = torch.randn(3, 8, FEATURES, dtype=torch.float64, requires_grad=True)
    mod(x)
    target = torch.zeros(24, dtype=torch.float64)
    target[mod.route.index] = 1
    p = torch.sigmoid(x.detach().view(24, -1) @ mod.predictor + mod.predictor_bias)
    expected = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
    assert relative_error(mod.route.loss, expected) < 1e-12
    of = [mod.predictor, mod.predictor_bias]
    found = torch.autograd.grad(mod.route.loss, [*of, mod.router, x], allow_unused=True)
    for f, e in zip(found[:2], torch.autograd.grad(expected, of), strict=True):
        assert relative_error(f, e) < 1e-12
    assert found[2] is None and found[3] is None


def test_the_predictor_learns_the_choice() -> None:
    mod = make(PrefixSum(), 0.25)
    optimizer = torch.optim.Adam([mod.predictor, mod.predictor_bias], lr=0.05)
    for _ in range(200):
        mod(torch.randn(4, 64, FEATURES, dtype=torch.float64))
        optimizer.zero_grad()
        mod.route.loss.backward()
        optimizer.step()
    x = torch.randn(16, 64, FEATURES, dtype=torch.float64)
    mod(x)
    wanted = set(mod.route.index.tolist())
    mod.eval()(x)
    found = set(mod.route.index.tolist())
    assert len(wanted & found) > 0.7 * len(wanted | found)


@pytest.mark.parametrize("choice", ["top_k", "predictor"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_recomputation_does_not_choose_again(choice: str, nested: bool) -> None:
    mod = make(PrefixSum(), choice=choice)
    with torch.no_grad():  # half of the tokens, whatever their first feature, which tells the tokens apart
        mod.predictor_bias.zero_()
        mod.predictor[0] = 0
    x = torch.randn(2, 12, FEATURES, dtype=torch.float64)
    x[..., 0] = torch.arange(24).view(2, 12)
    runs = 0

    def function(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        noise = 5 * torch.randn_like(x)
        noise[..., 0] = 0
        y: Tensor = mod(x + noise if runs > 1 else x)
        return y.sin()

    def outer(x: Tensor) -> Tensor:
        return shoestring.checkpoint(function, x).cos() if nested else function(x)

    y = shoestring.checkpoint(outer, x.requires_grad_())
    route, first = mod.route, list(mod.block.seen)
    y.sum().backward()
    assert runs > 1 and mod.route is route
    for begin in range(len(first), len(mod.block.seen), len(first)):
        later = mod.block.seen[begin : begin + len(first)]
        assert all(torch.equal(a, b) for a, b in zip(first, later, strict=True))


def test_a_checkpoint_has_the_gradients_of_a_plain_call() -> None:
    mod = make(Layer())
    x = torch.randn(2, 12, FEATURES, dtype=torch.float64, requires_grad=True)
    of = [x, *mod.parameters()]

    def loss(y: Tensor) -> Tensor:
        total: Tensor = y.square().sum() + mod.route.loss
        return total

    expected = torch.autograd.grad(loss(mod(x)), of)
    found = torch.autograd.grad(loss(shoestring.checkpoint(mod, x)), of)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits(autocast: bool) -> None:
    mod = shoestring.nn.MixtureOfDepths(Layer(), FEATURES, 0.5)
    x = torch.randn(2, 12, FEATURES)
    if not autocast:
        mod, x = mod.bfloat16(), x.bfloat16()
    wide = copy.deepcopy(mod).float()
    expected = wide(x.float())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = mod(x)
    assert mod.route is not None and wide.route is not None
    assert y.dtype == x.dtype and mod.route.weight.dtype == mod.route.loss.dtype == torch.float32
    assert torch.equal(mod.route.index, wide.route.index)
    assert torch.allclose(mod.route.weight, wide.route.weight, 1e-5, 1e-6)
    assert 0 < relative_error(y, expected) < 2e-2  # a few roundings of 2**-9


def test_names_files_and_copies() -> None:
    mod = shoestring.nn.MixtureOfDepths(
        shoestring.nn.GatedMLP(FEATURES, 4, dtype=torch.float64), FEATURES, 0.5
    )
    names = {name: tuple(t.shape) for name, t in mod.state_dict().items() if "block" not in name}
    assert names == {"router": (8,), "predictor": (8,), "predictor_bias": (1,)}
    assert mod.router.dtype == torch.float64
    bound = FEATURES**-0.5
    assert all(p.abs().max() <= bound for p in (mod.router, mod.predictor, mod.predictor_bias))
    x = torch.randn(2, 6, FEATURES, dtype=torch.float64)
    y = mod(x)
    file = io.BytesIO()
    torch.save(mod.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(mod)
    assert other.route is None
    integers(other)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(mod))(x), y)


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., 1:]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0.0}, "capacity: expected a share above 0 and at most 1, received 0.0"),
        ({"capacity": 1.5}, "capacity: expected"),
        ({"capacity": float("nan")}, "capacity: expected"),
        ({"features": 0}, "features: expected a number above 0, received 0"),
        ({"score": "tanh"}, "score: expected one of 'linear', 'sigmoid', received 'tanh'"),
        ({"choice": "best"}, "choice: expected one of 'auto', 'top_k', 'predictor', received 'best'"),
        ({"block": "path"}, "block|model"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"block": PrefixSum(), "features": FEATURES} | options
    with pytest.raises((ValueError, TypeError), match=words) as error:
        shoestring.nn.MixtureOfDepths(**arguments)
    assert str(error.value).startswith("nn.MixtureOfDepths: ")


X = torch.zeros(2, 4, FEATURES, dtype=torch.float64)


@pytest.mark.parametrize(
    ("block", "x", "arguments", "words"),
    [
        (PrefixSum(), X[..., 1:], {}, r"x: expected \(batch, tokens, 8\), or \(tokens, 8\), received \(2, 4, 7\)"),
        (PrefixSum(), X[0, 0], {}, "x: expected"),
        (Narrow(), X, {}, r"block: expected a result of the shape of its input, \(2, 2, 8\), received \(2, 2, 7\)"),
        (Pair(), X, {}, "block: expected .* received tuple"),
        (Layer(), X, {"position_ids": torch.arange(5)}, r"position_ids: expected \(1 or batch, tokens\)"),
        (Layer(), X, {"bias": torch.zeros(4, 4)}, "bias: expected no such tensor"),
        (Layer(), X, {"attention_mask": torch.zeros(2, 1, 4, 5)}, "attention_mask: expected"),
        (Layer(), X, {"cu_seqlens_q": torch.tensor([0, 4])}, "cu_seqlens_q: expected None with a batch of 2"),
        (Layer(), X[0], {"cu_seqlens_q": torch.tensor([0, 3])}, r"ascending offsets from 0 to 4, received \[0, 3\]"),
        (
            Layer(),
            X[0],
            {"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 2, 4])},
            "cu_seqlens_k: expected the offsets of cu_seqlens_q",
        ),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(block: nn.Module, x: Tensor, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^nn.MixtureOfDepths: .*{words}"):
        make(block, 0.5)(x, **arguments)


def test_a_cache_needs_equally_many_tokens() -> None:
    model = llama().eval()
    layer = model.model.layers[1]
    tokens = torch.randint(64, (8, 20))
    with pytest.raises(ValueError, match="past_key_values: expected None"):
        model(tokens, use_cache=True)
    assert model(tokens, use_cache=False).logits.shape == (8, 20, 64)
    assert layer.route.offsets.diff().unique().numel() > 1
