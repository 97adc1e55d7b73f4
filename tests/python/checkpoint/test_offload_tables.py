"""Test that embeddings and output layers whose weights are in a file give the bits of those in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from offloaded_llama import LAYERS, batch, llama
from shoestring import offload_weights

pytestmark = pytest.mark.usefixtures("small_weights_leave")

CLASSES, FEATURES = 70_001, 64  # two panels in fp32


def table_of(weight: Tensor, folder: Path) -> Any:
    store = torch.classes.shoestring.WeightStore(weight.device, str(folder), 0, False)
    store.add_table("head", weight)
    return store


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 10.0, "z_loss": 1e-4, "label_smoothing": 0.1, "logit_scale": 0.5},
    "bias": {"bias": torch.randn(CLASSES, generator=torch.Generator().manual_seed(2))},
    "none": {"reduction": "none"},
    "chunks": {"workspace_mb": 4},
    "lora": {"lora_A": torch.randn(4, FEATURES) / 8, "lora_B": torch.randn(CLASSES, 4) / 8, "scaling": 2.0},
}


@pytest.mark.skipif(
    torch.ops.shoestring._cpu_capability() == "plain", reason="PyTorch's library computes the products"
)
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_losses_read_a_head_that_is_away(
    case: str, dtype: torch.dtype, of_weight: torch.dtype, tmp_path: Path
) -> None:
    options = {
        key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in HEADS[case].items()
    }
    weight = (torch.randn(CLASSES, FEATURES) / 8).to(of_weight)
    target = torch.randint(CLASSES, (48,)).index_fill_(0, torch.tensor([5]), -100)
    hidden = torch.randn(48, FEATURES).to(dtype).requires_grad_()
    here = shoestring.linear_cross_entropy(hidden, weight, target, **options)
    here.sum().backward()
    expected, hidden.grad = hidden.grad, None
    store = table_of(weight, tmp_path)
    with pytest.raises(RuntimeError, match="offload_weights: head: expected weights on cpu, received some"):
        weight.sum()
    away = shoestring.linear_cross_entropy(hidden, weight, target, **options)
    away.sum().backward()
    assert torch.equal(here, away)
    if dtype == torch.float64:  # PyTorch's library computes these products, and sums in an order of its own
        torch.testing.assert_close(hidden.grad, expected, rtol=1e-12, atol=1e-15)
    elif case == "chunks" and of_weight != dtype and torch.cpu._is_avx512_bf16_supported():
        # A chunk has fewer than 8 tokens. The library computes products of so few rows in bf16, and rounds that of
        # each panel. With s the largest sum, the roundings are at most 2**-9 s of the whole product, 1.3 and 0.3
        # of that for two panels of 64,512 and 5,489 random terms, and 1 for their sum.
        scale = expected.abs().max().item()  # type: ignore[union-attr]
        torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=4 * 2**-9 * scale)
    elif case == "chunks" and dtype == of_weight == torch.float32:
        # The library splits the sum over 70,001 classes of so few rows as it likes. Each addition rounds by 2**-24
        # at most, and the roundings of the terms of a sum are random.
        scale = expected.abs().max().item()  # type: ignore[union-attr]
        torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=CLASSES**0.5 * 2**-24 * scale)
    else:
        assert torch.equal(hidden.grad, expected)  # type: ignore[arg-type]
    assert store.statistics()["fetched"] % weight.nbytes == 0


def test_other_losses_of_a_head_that_is_away(tmp_path: Path) -> None:
    weight = torch.randn(CLASSES, FEATURES) / 8
    hidden = torch.randn(48, FEATURES, requires_grad=True)
    teacher, target = torch.randn(48, FEATURES), torch.randint(CLASSES, (48,))

    def losses() -> list[Tensor]:
        hidden.grad = None
        stats = shoestring.linear_cross_entropy_with_stats(hidden, weight, target)
        distilled = shoestring.linear_distillation(hidden, weight, teacher, weight)
        (stats.loss + stats.entropy.sum() + distilled).backward()
        # The filter leaves out classes of gradients only, so the loss is the same where there is no filter.
        filtered = shoestring.linear_cross_entropy(hidden, weight, target, filter_eps=2**-12)
        return [stats.loss, stats.entropy, distilled, filtered, hidden.grad]  # type: ignore[list-item]

    expected = losses()
    store = table_of(weight, tmp_path)
    received = losses()
    for one, two in zip(received[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(received[-1], expected[-1])
    with pytest.raises(
        RuntimeError, match="weight: expected a frozen weight, or one on cpu, received one that is away"
    ):
        shoestring.linear_cross_entropy(hidden, weight.requires_grad_(), target)
    del store


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("patch", [False, True], ids=["", "patched"])
def test_models_with_tables_have_the_same_bits(tied: bool, patch: bool, tmp_path: Path) -> None:
    results = []
    for to in (None, f"nvme:{tmp_path}"):
        model: Any = llama(
            layers=3, vocab_size=2000, tie_word_embeddings=tied, pad_token_id=1999, use_cache=True
        )
        shoestring.lora.apply(model, rank=4)
        if to is not None:
            handle = offload_weights(model, to)
        if patch:
            shoestring.patch(model)
        x = torch.randint(2000, (2, 24), generator=torch.Generator().manual_seed(1))
        x[0, :3] = 1999
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.eval()
        logits = model(input_ids=x).logits
        made = model.generate(x[1:], max_new_tokens=4, do_sample=False)
        state = model.state_dict()
        results.append(
            [loss, *gradients, logits, made, *(v for v in state.values() if isinstance(v, Tensor))]
        )
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    weights_of_tables = 2000 * 64 * 4 * (1 if tied else 2)
    blocks = sum(p.numel() for n, p in model.named_parameters() if "layers" in n and "_proj.weight" in n) * 4
    assert handle.statistics()["away"] == pytest.approx(blocks + weights_of_tables, rel=0.01)
    assert model.model.embed_tokens.padding_idx == 1999
    handle.undo()
    assert model.model.embed_tokens.weight.isfinite().all()


def test_rows_of_an_embedding(tmp_path: Path) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 3

    for size, features, dtype in [
        (700, 33, torch.float32),
        (5000, 5, torch.bfloat16),
        (64, 4096, torch.float32),
    ]:
        plain = Scaled(size, features, padding_idx=size - 1, dtype=dtype).requires_grad_(False)
        blocks = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2))).requires_grad_(False)
        model = nn.ModuleDict({"embed": plain, "blocks": blocks})
        x = torch.randint(size, (3, 257))
        expected = plain(x), plain(x[:0]), plain(x[0, 0])
        handle = offload_weights(model, f"nvme:{tmp_path}", blocks=["blocks.*"])
        before = handle.statistics()["fetched"]
        for one, two in zip((plain(x), plain(x[:0]), plain(x[0, 0])), expected, strict=True):
            assert torch.equal(one, two)
        rows = (len(x.unique()) + 1) * features * dtype.itemsize
        assert handle.statistics()["fetched"] - before == rows
        with pytest.raises(IndexError, match=rf"embed: expected indices in \[0, {size}\), received {size}"):
            plain(torch.tensor([size]))
        assert torch.equal(plain(x), expected[0])


@pytest.mark.parametrize("where", ["block", "rows", "head"])
def test_a_changed_byte_in_the_file_is_noticed(where: str, tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    shoestring.patch(model)
    x = batch(0)
    before = model(input_ids=x, labels=x).loss
    handle = offload_weights(model, f"nvme:{tmp_path}", keep=0)
    assert torch.equal(model(input_ids=x, labels=x).loss, before)
    size = handle.statistics()["disk"]
    layer = (size - 2 * 512 * 64 * 4) // LAYERS
    # The file holds the blocks, the embedding and the output layer, in this order.
    token = int(x[0, 0])
    at = {"block": 3 * layer + 77, "rows": LAYERS * layer + token * 256 + 5, "head": size - 9}[where]
    for descriptor in Path("/proc/self/fd").iterdir():
        if str(descriptor.readlink() if descriptor.is_symlink() else "").startswith(str(tmp_path)):
            with descriptor.open("r+b", buffering=0) as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 16]))
            break
    else:
        pytest.fail("the file was not found")
    with pytest.raises(
        RuntimeError,
        match=rf"offload_weights: {tmp_path}/.*: expected the \d+ bytes at \d+ that were written",
    ) as caught:
        for _ in range(2):
            model(input_ids=x, labels=x)
    count, begin = (int(word) for word in re.findall(r"the (\d+) bytes at (\d+)", str(caught.value))[0])
    assert begin <= at < begin + count


def test_weights_that_are_made_as_they_leave(tmp_path: Path) -> None:
    x = batch(0)

    def draw(module: nn.Module) -> None:
        made.append(module)
        module.to_empty(device="cpu").requires_grad_(False)
        for weight in module.parameters():
            nn.init.uniform_(weight, -0.1, 0.1)

    logits = []
    for to in (None, f"nvme:{tmp_path}"):
        made: list[nn.Module] = []
        torch.manual_seed(0)
        with torch.device("meta"):
            model = llama()
        model.model.norm.to_empty(device="cpu").weight.detach().fill_(1)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        units = [*model.model.layers, model.model.embed_tokens, model.lm_head]
        model.requires_grad_(False)
        torch.manual_seed(3)
        if to is None:
            for unit in units:
                draw(unit)
        else:
            offload_weights(model, to, param_init_fn=draw)
        assert made == units
        logits.append(model(input_ids=x).logits)
    assert torch.equal(*logits)
    with torch.device("meta"):
        model = llama().requires_grad_(False)
    with pytest.raises(
        ValueError, match="param_init_fn: expected weights for model.layers.0, received none for self_attn"
    ):
        offload_weights(model, f"nvme:{tmp_path}", param_init_fn=lambda module: None)


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    model = llama()
    for tables in (["lm_head"], ["no"], [model.model.layers[0].mlp.up_proj], [nn.Embedding(4, 4)]):
        with pytest.raises(ValueError, match="tables: expected frozen embeddings or linear layers outside"):
            offload_weights(model, f"nvme:{tmp_path}", tables=tables)  # type: ignore[arg-type]
    model.requires_grad_(False)
    handle = offload_weights(model, f"nvme:{tmp_path}", tables=["lm_head"])
    assert model.model.embed_tokens.weight.isfinite().all()
    with pytest.raises(RuntimeError, match="lm_head: expected weights on cpu"):
        model.lm_head.weight.sum()
    handle.undo()


def test_linear_blocks_that_are_made_are_no_tables(tmp_path: Path) -> None:
    """A block that is itself a frozen linear layer comes and leaves as a block, before and after it runs."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)

    def draw(module: nn.Module) -> None:
        module.to_empty(device="cpu").requires_grad_(False)
        for weight in module.parameters():
            nn.init.uniform_(weight, -0.1, 0.1)

    handle = offload_weights(model, f"nvme:{tmp_path}", blocks=[nn.Linear], param_init_fn=draw)
    block = handle.statistics()["away"] // 4
    with torch.no_grad():
        assert model(torch.randn(3, 64)).isfinite().all()
    assert handle.statistics()["device"] == 2 * block  # the last block, and the first of the next forward
