"""The models, data and candidates of bench_step.py: what a training step consists of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.random_llama import SIZES

Batch = dict[str, Tensor]
RANK = 16
# "full" is timed. "small" trains for the 200 steps of --losses. "quick" shows that everything runs.
SCALES = ("full", "small", "quick")
LLAMA = {
    "full": dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, vocab_size=16_384, rows=4, tokens=512),
    "small": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, vocab_size=4_096, rows=2, tokens=128),
    "quick": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, vocab_size=512, rows=2, tokens=32),
}  # fmt: skip
BERT = {
    "full": dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=30_522, rows=8, tokens=256),
    "small": dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=3, vocab_size=4_096, rows=4, tokens=64),
    "quick": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=512, rows=2, tokens=32),
}  # fmt: skip
VIT = {
    "full": dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, image_size=224, images=16),
    "small": dict(hidden_size=192, intermediate_size=768, num_hidden_layers=3, image_size=96, images=8),
    "quick": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, image_size=32, images=2),
}  # fmt: skip
RESNET = {
    "full": dict(hidden_sizes=[64, 128, 256, 512], image_size=224, images=16),
    "small": dict(hidden_sizes=[32, 64, 128, 256], image_size=96, images=8),
    "quick": dict(hidden_sizes=[8, 16, 32, 64], image_size=32, images=2),
}
QLORA = {"full": ("1b", 512), "small": ("tiny", 64), "quick": ("tiny", 32)}


@dataclass(frozen=True)
class Candidate:
    """One way to run a training step.

    Attributes:
        label: name in the tables.
        ours: whether shoestring patches the model and provides the optimizer.
        mode: the mode of torch.compile, or None for a model that is not compiled.
        channels_last: memory format of images and of the weights of convolutions.
        nf4: whether the frozen weights of a model with adapters are stored in NF4.
        allocator: whether CPU tensors come from shoestring.host_allocator().
    """

    label: str
    ours: bool = False
    mode: str | None = None
    channels_last: bool = False
    nf4: bool = False
    allocator: bool = False


TUNED = "max-autotune-no-cudagraphs"
OURS = {
    "ours": Candidate("shoestring", ours=True),
    "ours-allocator": Candidate("shoestring, host allocator", ours=True, allocator=True),
    "ours-compile": Candidate("shoestring, compiled", ours=True, mode="default"),
}
PEERS = {
    "eager": Candidate("PyTorch"),
    "compile": Candidate("PyTorch, compiled", mode="default"),
    "max-autotune": Candidate("PyTorch, compiled, max-autotune", mode=TUNED),
}
IMAGE_PEERS = {
    "eager-channels-last": Candidate("PyTorch, channels-last", channels_last=True),
    "compile-channels-last": Candidate(
        "PyTorch, channels-last, compiled", mode="default", channels_last=True
    ),
}
IMAGE_OURS = {
    "ours": Candidate("shoestring, channels-last", ours=True, channels_last=True),
    "ours-allocator": Candidate(
        "shoestring, channels-last, host allocator", ours=True, channels_last=True, allocator=True
    ),
    "ours-compile": Candidate(
        "shoestring, channels-last, compiled", ours=True, mode="default", channels_last=True
    ),
}
ADAPTERS = {
    "ours": Candidate("shoestring, NF4", ours=True, nf4=True),
    "ours-allocator": Candidate("shoestring, NF4, host allocator", ours=True, nf4=True, allocator=True),
    "ours-compile": Candidate("shoestring, NF4, compiled", ours=True, mode="default", nf4=True),
    "eager": Candidate("PEFT over bf16 weights"),
    "peft-nf4": Candidate("PEFT + bitsandbytes", nf4=True),
    "peft-nf4-compile": Candidate("PEFT + bitsandbytes, compiled", nf4=True, mode="default"),
}


@dataclass(frozen=True)
class Case:
    """One model and precision.

    Attributes:
        family: "llama", "qlora", "bert", "vit" or "resnet".
        precision: "fp32"; "amp" for bf16 autocast over fp32 weights; "bf16" for bf16 weights.
        candidates: by the names that --candidates takes, ours first.
        apart: run one candidate after the other, because all of them at once need too much memory.
    """

    family: str
    precision: str
    candidates: dict[str, Candidate] = field(default_factory=lambda: {**OURS, **PEERS})
    apart: bool = False

    @property
    def unit(self) -> str:
        return "images/s" if self.family in ("vit", "resnet") else "tokens/s"

    def title(self, scale: str) -> str:
        precision = {"amp": "bf16 autocast", "bf16": "bf16 weights"}.get(self.precision, self.precision)
        if self.family == "qlora":
            size, tokens = QLORA[scale]
            return f"QLoRA of a Llama of size {size}, rank {RANK}, {tokens} tokens, bf16"
        if self.family in ("llama", "bert"):
            c: dict[str, Any] = {"llama": LLAMA, "bert": BERT}[self.family][scale]
            name = {"llama": "Llama", "bert": "BERT, masked LM"}[self.family]
            return (
                f"{name}, {c['num_hidden_layers']} layers of {c['hidden_size']}, vocabulary {c['vocab_size']}, "
                f"{c['rows']} x {c['tokens']} tokens, {precision}"
            )
        c = {"vit": VIT, "resnet": RESNET}[self.family][scale]
        name = {"vit": "ViT", "resnet": "ResNet-18"}[self.family]
        return f"{name}, width {c.get('hidden_size', c.get('hidden_sizes'))}, {c['images']} x {c['image_size']}² images, {precision}"

    def items(self, scale: str) -> int:
        """Return the number of tokens or images in a step."""
        if self.family == "qlora":
            return QLORA[scale][1]
        if self.family in ("llama", "bert"):
            c: dict[str, Any] = {"llama": LLAMA, "bert": BERT}[self.family][scale]
            return int(c["rows"] * c["tokens"])
        return int({"vit": VIT, "resnet": RESNET}[self.family][scale]["images"])  # type: ignore[call-overload]


CASES = {
    f"{family}-{precision}": Case(family, precision)
    for family in ("llama", "bert", "vit")
    for precision in ("fp32", "amp", "bf16")
    if family == "llama" or precision != "bf16"
}
CASES |= {
    f"resnet-{precision}": Case("resnet", precision, {**IMAGE_OURS, **PEERS, **IMAGE_PEERS})
    for precision in ("fp32", "amp")
}
CASES["qlora"] = Case("qlora", "bf16", ADAPTERS, apart=True)


def language_model(family: str, scale: str) -> nn.Module:
    import transformers as t

    c: dict[str, Any] = dict({"llama": LLAMA, "bert": BERT}[family][scale])
    c.pop("rows")
    heads = c["hidden_size"] // 64
    shape = c | {"num_attention_heads": heads, "max_position_embeddings": c.pop("tokens")}
    if family == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**shape, tie_word_embeddings=False, use_cache=False))
    # Dropout would give every candidate other random numbers, and so other losses.
    return t.BertForMaskedLM(t.BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def image_model(family: str, scale: str) -> nn.Module:
    import transformers as t

    if family == "vit":
        c: dict[str, Any] = dict(VIT[scale])
        c.pop("images")
        config = t.ViTConfig(**c, num_attention_heads=c["hidden_size"] // 64, num_labels=1000)
        return t.ViTForImageClassification(config)
    sizes: Any = RESNET[scale]["hidden_sizes"]
    return t.ResNetForImageClassification(
        t.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=sizes, embedding_size=sizes[0],
                       num_labels=1000)
    )  # fmt: skip


def adapted_model(candidate: Candidate, folder: Path) -> nn.Module:
    """Return the model in ``folder`` with adapters of rank 16 on all linear layers but the output layer."""
    if candidate.ours:
        import shoestring

        model: nn.Module = shoestring.load_quantized(folder, double_quant=True)
        shoestring.lora.apply(model.train(), rank=RANK)
    else:
        import peft
        import transformers as t

        quantized = (
            t.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            if candidate.nf4
            else None
        )  # fmt: skip
        base = t.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=quantized, device_map={"": "cpu"} if quantized else None
        )  # fmt: skip
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
        model = peft.get_peft_model(base, config).train()
    model.config.use_cache = False
    return model


def batches(case: Case, scale: str, seed: int, count: int) -> Iterator[Batch]:
    """Yield ``count`` random batches again and again, without end."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return itertools.cycle([_batch(case, scale, generator) for _ in range(count)])


def _batch(case: Case, scale: str, generator: torch.Generator) -> Batch:
    if case.family in ("vit", "resnet"):
        c: Any = {"vit": VIT, "resnet": RESNET}[case.family][scale]
        size = c["image_size"]
        return {
            "pixel_values": torch.randn(c["images"], 3, size, size, generator=generator),
            "labels": torch.randint(1000, (c["images"],), generator=generator),
        }
    if case.family == "qlora":
        size_name, tokens = QLORA[scale]
        ids = torch.randint(SIZES[size_name]["vocab_size"], (1, tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}
    c = {"llama": LLAMA, "bert": BERT}[case.family][scale]
    ids = torch.randint(c["vocab_size"], (c["rows"], c["tokens"]), generator=generator)
    if case.family == "llama":
        return {"input_ids": ids, "labels": ids}
    # 15 % of the tokens have labels; their inputs become token 3, which stands for the mask.
    masked = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(masked, 3), "labels": ids.masked_fill(~masked, -100)}


@dataclass
class Task:
    """A model with its optimizer and data. ``step()`` trains on the next batch and returns the loss."""

    model: nn.Module
    step: Callable[[], float]
    notes: list[str]


def make(
    case: Case,
    candidate: Candidate,
    scale: str,
    folder: Path | None = None,
    seed: int = 0,
    count: int = 4,
    state_format: str = "8bit",
    disturb: bool = False,
) -> Task:
    """Build the model, the optimizer and the step of a candidate.

    Args:
        case: model and precision.
        candidate: how the step is run.
        scale: a name in SCALES.
        folder: model directory of the family "qlora".
        seed: of weights and data.
        count: number of batches, which return in turn.
        state_format: of our optimizer.
        disturb: change each weight by half a unit in its last place, up or down at random.
    """
    if candidate.allocator:
        import shoestring

        shoestring.host_allocator()
    torch.manual_seed(seed)
    notes: list[str] = []
    if case.family == "qlora":
        assert folder is not None
        model = adapted_model(candidate, folder)
    elif case.family in ("llama", "bert"):
        model = language_model(case.family, scale)
    else:
        model = image_model(case.family, scale)
    if case.precision == "bf16" and case.family != "qlora":
        model.to(torch.bfloat16)
    if candidate.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if disturb:
        with torch.no_grad():
            for p in model.parameters():
                unit = torch.finfo(p.dtype).eps / 2
                p.copy_(p * (1 + unit * (2 * torch.randint(2, p.shape) - 1)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if candidate.ours:
        import shoestring

        try:
            shoestring.patch(model)
        except (TypeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            notes.append(f"patch does not take this model, so only the optimizer is ours: {reason}")
        optimizer = shoestring.optim.AdamW(trained, lr=1e-3, state_format=state_format)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    forward: Callable[..., Any] = model
    if candidate.mode is not None:
        forward = torch.compile(model, mode=candidate.mode)
    data = batches(case, scale, seed, count)

    def step() -> float:
        batch = next(data)
        if candidate.channels_last:
            batch["pixel_values"] = batch["pixel_values"].contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "amp"):
            loss: Tensor = forward(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Task(model, step, notes)
