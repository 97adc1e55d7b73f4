"""Run the same operator calls in the emulator and on the GPU, and compare the results.

``python emulator_cases.py run simt|cuda FILE`` computes and saves the results. ``python emulator_cases.py
compare FILE FILE`` prints one line of JSON with a row for each tensor. The two backends need two processes,
since loading the emulator replaces the CPU operators by the CUDA kernels.

`allowed` is the largest difference that a tensor may have. For floating-point tensors its unit is the unit in
the last place of the largest element. For quantised codes its unit is one code step. `allowed` is 0 for
kernels that only move values, compare them and round once. Other kernels differ for three reasons:

- nvcc contracts a * b + c to one rounding, and g++ does not.
- The GPU has its own exp and log.
- cuBLAS sums in another order than the emulator.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the folder of the references

import shoestring
from build_folder import EMULATOR
from emulator_attention import attention
from operator_cases import operators
from optimizer_rules import ADAMW, LION, SGD, Rule, blocks
from references.optim import join
from shoestring.ops import (
    compress_gradient_,
    compressed_gradient_bytes,
    decompress_mean_,
    dequantize_8bit,
    dequantize_state_4bit,
    quantize_8bit,
    quantize_state_4bit,
)

Results = dict[str, tuple[Tensor, float]]  # by name: (tensor, largest difference that it may have)
OPERATORS = torch.ops.shoestring
# Largest share of quantised codes that may differ by one step because their values differ by rounding.
FLIPPED = 1e-2


def uniform(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return uniform random values in [-scale, scale), which do not depend on the device."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * scale


def byte_values(count: int, seed: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(
        low, high, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


def compressed_gradients(device: str) -> Results:
    found: Results = {}
    for bits in (8, 4, 1):
        for size, dtype in ((1, torch.float32), (1000, torch.bfloat16), (4097, torch.float16)):
            error = uniform(size, seed=size, scale=0.1).to(device)
            gradient = uniform(size, seed=size + 1).to(dtype).to(device)
            codes = torch.empty(
                2, compressed_gradient_bytes(size, bits=bits), dtype=torch.uint8, device=device
            )
            for row in codes:
                compress_gradient_(error, gradient, row, bits=bits)
            out = torch.empty(size, dtype=dtype, device=device)
            decompress_mean_(out, codes, bits=bits)
            found |= {
                f"codes {size} {bits}": (codes, 0),
                f"error {size} {bits}": (error, 0),
                f"mean {size} {bits}": (out, 0),
            }
    return found


def quantize_8bit_codes(device: str) -> Results:
    found: Results = {}
    for size in (1, 256, 1000, 4097):
        x = uniform(size, seed=size).to(device)
        for signed in (True, False):
            codes, scale = quantize_8bit(x if signed else x.abs(), signed=signed)
            found |= {
                f"codes {size} {signed}": (codes, 0),
                f"scale {size} {signed}": (scale, 0),
                f"values {size} {signed}": (dequantize_8bit(codes, scale, signed=signed), 2),
            }
    return found


def quantize_state_4bit_codes(device: str) -> Results:
    found: Results = {}
    for size, step in ((1, None), (256, 1), (1000, None), (4097, 77)):
        x = uniform(size, seed=size).to(device)
        for signed in (True, False):
            codes, scale = quantize_state_4bit(x if signed else x.abs(), signed=signed, step=step)
            values = dequantize_state_4bit(codes, scale, signed=signed, numel=size)
            found |= {
                f"codes {size} {signed}": (codes, 0),
                f"scale {size} {signed}": (scale, 0),
                f"values {size} {signed}": (values, 0),
            }
    return found


def quantize_4bit(device: str) -> Results:
    found: Results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind, block, size in (
            ("nf4", 64, 4096),
            ("fp4", 64, 1000),
            ("nf4", 32, 777),
            ("nf4", 4096, 9000),
            ("int4", 64, 4096),
            ("int4", 32, 777),
            ("int4", 4096, 9000),
        ):
            x = uniform(size, seed=size).to(device, dtype)
            packed, absmax = OPERATORS.quantize_4bit(x, quant_type=kind, block_size=block)
            name = f"{kind} {block} {size} {str(dtype)[6:]}"
            found |= {f"packed {name}": (packed, 0), f"absmax {name}": (absmax, 0)}
    return found


def fake_quantize(device: str) -> Results:
    """Fake-quantise whole vectors and remainders of every format, also of rows longer than a thread block's."""
    found: Results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind, block, shape in (
            ("nf4", 64, (9000,)),
            ("nf4", 4096, (9000,)),
            ("fp4", 32, (777,)),
            ("int4", 64, (777,)),
            ("int4", 4096, (9000,)),
            ("int8", None, (5, 77)),
            ("int8", None, (3, 5000)),
        ):
            x = uniform(*shape, seed=shape[0]).to(device, dtype)
            y = OPERATORS.fake_quantize(x, quant_type=kind, block_size=block)
            found[f"{kind} {block} {shape} {str(dtype)[6:]}"] = (y, 0)
    return found


def quantize_absmax(device: str) -> Results:
    codes, nested = OPERATORS.quantize_absmax(uniform(777, seed=1).abs().to(device))
    # The offset of the quantised scales is the mean of all scales, and its sum depends on the order of
    # additions.
    return {"codes": (codes, 1), "nested": (nested, 8)}


def dequantize_4bit(device: str) -> Results:
    found: Results = {}
    for block, size in ((64, 4096), (32, 777), (4096, 9001)):
        blocks = -(-size // block)
        packed = byte_values((size + 1) // 2, seed=size).to(device)
        absmax = uniform(blocks, seed=2).abs().to(device)
        codes, nested = (
            byte_values(blocks, seed=3).to(device),
            uniform(257 + -(-blocks // 256), seed=4).to(device),
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for name, scales in (("flat", (absmax, None)), ("nested", (codes, nested))):
                out = OPERATORS.dequantize_4bit(
                    packed, *scales, shape=(size,), dtype=dtype, quant_type="nf4", block_size=block
                )
                found[f"{name} {block} {size} {str(dtype)[6:]}"] = (out, 0)
    return found


def int8(device: str) -> Results:
    """Quantise and dequantise int8 rows: aligned, unaligned, kept in registers, read twice by the kernel."""
    found: Results = {}
    for columns in (64, 77, 5000, 5003):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            packed, absmax = OPERATORS.quantize_int8(uniform(5, columns, seed=columns).to(device, dtype))
            out = OPERATORS.dequantize_int8(packed, absmax, dtype=dtype)
            name = f"{columns} {str(dtype)[6:]}"
            found |= {
                f"packed {name}": (packed, 0),
                f"absmax {name}": (absmax, 0),
                f"values {name}": (out, 0),
            }
    return found


# (elements, dtype of the weight, dtype of the gradient), for whole and partial blocks of optimizer state
STEPPED = (
    (1, torch.float32, torch.float32),
    (4097, torch.float32, torch.float32),
    (256, torch.float32, torch.bfloat16),
    (1000, torch.bfloat16, torch.bfloat16),
    (512, torch.bfloat16, torch.float32),
    (777, torch.float16, torch.float16),
)


def optimizers(device: str) -> Results:
    """Do one step of each optimizer from given state, so that both backends start from equal inputs."""
    return {
        f"{rule.name} {state} {weights} {name}": row
        for rule in (ADAMW, LION, SGD)
        for state in ("8bit", "4bit", "bf16", "fp32")
        for weights in ("nearest", "stochastic", "remainder")
        for name, row in second_step(device, rule, state, weights).items()
    }


def second_step(device: str, rule: Rule, state: str, weights: str) -> Results:
    sizes = [n for n, _, _ in STEPPED]
    params = [uniform(n, seed=n).to(device, dtype) for n, dtype, _ in STEPPED]
    grads = [uniform(n, seed=100 + n).to(device, dtype) for n, _, dtype in STEPPED]
    arenas: list[Tensor | None] = [torch.ones(len(sizes), device=device)]
    for i, t in enumerate(rule.arenas(sizes, state)[1:]):
        if t is not None:
            values = (
                byte_values(t.numel(), i, low=1)
                if t.dtype == torch.uint8
                else uniform(t.numel(), seed=i).abs()
            )
            t = values.to(device, t.dtype)
        arenas.append(t)
    total, options = 256 * sum(map(blocks, sizes)), {}
    remainder = torch.randint(
        -(2**15), 2**15, (total,), generator=torch.Generator().manual_seed(1), dtype=torch.int16
    )
    if weights == "stochastic":
        options = {
            "stochastic_rounding": True,
            "seed": 5,
            "accumulated": uniform(total, seed=2).to(device).bfloat16(),
        }
    if weights == "remainder":
        options = {"weight_remainder": remainder.to(device), "accumulated": uniform(total, seed=2).to(device)}
    rule.step(params, grads, *arenas, **rule.hyper, **options)
    found: Results = {}
    begin = 0
    for i, p in enumerate(params):
        if weights == "remainder" and p.dtype == torch.bfloat16:
            p = join(p, options["weight_remainder"][begin : begin + p.numel()])
        found[f"parameter {i}"] = (p, 8)
        begin += 256 * blocks(p.numel())
    for name, t in zip(rule.arena_names(), arenas, strict=True):
        if t is not None:
            if state == "4bit" and t.dtype == torch.uint8:
                t = torch.stack([t & 15, t >> 4], 1).short()
                # codes of signed moments are in two's complement
                t = (t ^ 8) - 8 if rule.moments[name] else t
            found[name] = (t, 1 if not t.is_floating_point() else 0 if name == "step" else 4)
    if "accumulated" in options:
        found["accumulated"] = (options["accumulated"], 0)
    return found


def linear_cross_entropy(device: str) -> Results:
    found: Results = {}
    tokens, features, vocab = 40, 48, 515
    for dtype, allowed in ((torch.float32, 64.0), (torch.bfloat16, 4.0)):
        weights = (uniform(vocab, seed=9) + 1).to(device)
        everything = {"class_weights": weights, "z_loss": 1e-2, "logit_scale": 0.7, "label_smoothing": 0.1}
        filtered = {"filter_eps": 2.0**-20}
        for options in (
            {},
            {"softcap": 5.0, "label_smoothing": 0.1},
            {"reduction": "none"},
            everything,
            filtered,
            {"mix": 0.3},
        ):
            hidden = uniform(tokens, features, seed=5).to(device, dtype).requires_grad_()
            weight = uniform(vocab, features, seed=6, scale=0.5).to(device, dtype).requires_grad_()
            bias = uniform(vocab, seed=7)
            target = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(8)).to(device)
            if (
                options is filtered
                # The logits of classes from 170 on are far below the threshold of the gradient filter, the
                # other logits far above it. So no rounding decides whether a class is filtered out.
            ):
                bias[170:] -= 30
                target %= 170
            bias = bias.to(device, dtype).requires_grad_()
            given = {**options, "target2": target.flip(0)} if "mix" in options else options
            target[3] = -100
            # Differentiate all results but argmax, which has no gradient and which a rounding may change.
            if options is everything:
                results = shoestring.linear_cross_entropy_with_stats(hidden, weight, target, bias, **given)[
                    :4
                ]
            else:
                results = (shoestring.linear_cross_entropy(hidden, weight, target, bias, **given),)
            torch.autograd.backward([x.sum() for x in results])
            name = f"{str(dtype)[6:]} {' '.join(options)}".strip()
            # A matrix product in 16 bits rounds the logits to 16 bits. So the fp32 results may differ as much
            # as 16-bit logits do.
            of_result = allowed * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
            for part, x in zip(("loss", "token_loss", "lse", "entropy"), results):
                found[f"{name} {part}"] = (x.detach(), of_result)
            for part, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
                found[f"{name} grad_{part}"] = (x.grad, allowed)
    return found


def linear_distillation(device: str) -> Results:
    """Distil a 4-bit head into a 4-bit head with a LoRA adapter; several warps share a row of logits."""
    found: Results = {}
    tokens, features, vocab = 40, 64, 515
    for dtype, allowed in ((torch.float32, 64.0), (torch.bfloat16, 4.0)):
        for options in (
            {},
            {"divergence": "reverse_kl", "temperature": 2.0},
            {"divergence": "jsd", "reduction": "none"},
        ):
            leaves = {
                "hidden": uniform(tokens, features, seed=5).to(device, dtype),
                "bias": uniform(vocab, seed=7).to(device, dtype),
                "lora_A": uniform(4, features, seed=10, scale=0.2).to(device, dtype),
                "lora_B": uniform(vocab, 4, seed=11).to(device, dtype),
            }
            leaves = {name: t.requires_grad_() for name, t in leaves.items()}
            teacher = uniform(tokens, features, seed=6).to(device, dtype)
            heads = [
                shoestring.quantize_4bit(uniform(vocab, features, seed=s, scale=0.5).to(device, dtype))
                for s in (8, 9)
            ]
            target = torch.zeros(tokens, dtype=torch.int64, device=device)
            target[3] = -100
            loss = shoestring.linear_distillation(
                weight=heads[0],
                teacher_hidden=teacher,
                teacher_weight=heads[1],
                target=target,
                **leaves,
                **options,
            )
            loss.sum().backward()
            name = f"{str(dtype)[6:]} {' '.join(map(str, options.values()))}".strip()
            # A matrix product in 16 bits rounds the logits to 16 bits, as in the case linear_cross_entropy.
            found[f"{name} loss"] = (
                loss.detach(),
                allowed * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps,
            )
            for part, x in leaves.items():
                found[f"{name} grad_{part}"] = (x.grad, allowed)
    return found


def cross_entropy(device: str) -> Results:
    found: Results = {}
    tokens, vocab = 40, 1031  # with an odd vocabulary, the rows of logits are not aligned
    target = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(8)).to(device)
    target[3] = -100
    weights = (uniform(vocab, seed=9) + 1).to(device)
    everything = {"class_weights": weights, "z_loss": 1e-2, "logit_scale": 0.7, "label_smoothing": 0.1}
    for dtype, allowed in ((torch.float32, 64.0), (torch.bfloat16, 1.0), (torch.float16, 2.0)):
        for options in ({}, {"softcap": 5.0}, {"reduction": "none"}, everything, {"mix": 0.3}):
            given = {**options, "target2": target.flip(0)} if "mix" in options else options
            for inplace in (False, True):
                leaf = uniform(tokens, vocab, seed=5, scale=8).to(device, dtype).requires_grad_()
                results = shoestring.cross_entropy_with_stats(leaf * 1, target, inplace=inplace, **given)[:4]
                torch.autograd.backward([x.sum() for x in results if x.requires_grad])
                name = f"{str(dtype)[6:]} {'in place ' * inplace}{' '.join(options)}".strip()
                for part, x in zip(("loss", "token_loss", "lse", "entropy"), results):
                    found[f"{name} {part}"] = (x.detach(), 64.0)
                found[f"{name} grad_logits"] = (leaf.grad, allowed)
    return found


def table_of_cases(device: str) -> Results:
    """Run the cases of the operators' own tests (operator_cases.py), but not those of embedding and of matrix products.

    On CUDA, embedding calls PyTorch's operators, and linear layers those of cuBLAS. Losses and attention have functions
    of their own.
    """
    found: Results = {}
    for name, operator in sorted(operators().items()):
        if operator.autocast is not None or name.startswith(("cross_entropy", "embedding")):
            continue
        for case in operator.cases:
            if case.dtype != torch.float64:
                results = case.results(operator.call, case.given(1, device), 1)
                allowed = 32.0 if case.dtype == torch.float32 else 1.0
                found |= {f"{name} {case.name} {part}": (t, allowed) for part, t in results.items()}
    return found


def moe_sort(device: str) -> Results:
    """Sort slots of one part and of several, of which some have no expert."""
    found: Results = {}
    for slots, experts in ((5, 3), (1000, 60), (9001, 128)):
        index = byte_values(slots, seed=slots, high=experts + 1).long() - 1
        results = OPERATORS.moe_sort(index.to(device), experts)
        found |= {f"{slots} {experts} {i}": (t, 0) for i, t in enumerate(results)}
    return found


def grouped_linear(device: str) -> Results:
    """Multiply the rows of experts that have none, few, or more than a tile; some slots have no expert."""
    found: Results = {}
    offsets = torch.tensor([2, 2, 7, 140, 145], device=device)
    rows = byte_values(150, seed=1, high=60).long().to(device)
    for dtype, allowed in ((torch.float32, 32.0), (torch.bfloat16, 1.0), (torch.float16, 1.0)):
        for features in ((72, 136), (5, 37)):
            for refer in (True, False):
                leaves = {
                    "x": uniform(60 if refer else 150, features[1], seed=2),
                    "weight": uniform(4, *features, seed=3),
                    "bias": uniform(4, features[0], seed=4),
                }
                leaves = {name: t.to(device, dtype).requires_grad_() for name, t in leaves.items()}
                out = OPERATORS.grouped_linear(
                    leaves["x"],
                    leaves["weight"],
                    offsets,
                    rows=rows if refer else None,
                    bias=leaves["bias"],
                )
                grad = uniform(*out.shape, seed=5).to(device, dtype)
                results = (out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad))
                for part, t in zip(("out", *leaves), results, strict=True):
                    found[f"{str(dtype)[6:]} {features} {refer} {part}"] = (t, allowed)
    return found


def moe_experts(device: str) -> Results:
    """Compute each gate, in whole vectors and single features; some slots have no expert, or a NaN as weight."""
    found: Results = {}
    index = byte_values(80, seed=1, high=3).long().view(40, 2) - 1
    index[index[:, 0] == index[:, 1], 1] = -1
    for dtype, allowed in ((torch.float32, 32.0), (torch.bfloat16, 2.0), (torch.float16, 2.0)):
        for activation, limit, layout, (features, hidden) in (
            ("silu", None, False, (72, 40)),
            ("gelu", 1.0, True, (21, 11)),
            ("gelu_tanh", None, True, (24, 8)),
            ("swigluoai", 0.5, False, (21, 11)),
        ):
            weight = uniform(40, 2, seed=2)
            weight[index < 0] = math.nan
            gate_up, down = uniform(2, 2 * hidden, features, seed=4), uniform(2, features, hidden, seed=5)
            if layout:
                gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
            leaves = {
                "x": uniform(40, features, seed=3),
                "weight": weight,
                "gate_up": gate_up,
                "down": down,
                "gate_up_bias": uniform(2, 2 * hidden, seed=6),
                "down_bias": uniform(2, features, seed=7),
            }
            leaves = {name: t.to(device, dtype).requires_grad_() for name, t in leaves.items()}
            out = OPERATORS.moe_experts(
                index=index.to(device),
                activation=activation,
                limit=limit,
                interleaved=layout,
                transposed=layout,
                **leaves,
            )
            grad = uniform(40, features, seed=8).to(device, dtype)
            results = (out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad))
            for part, t in zip(("out", *leaves), results, strict=True):
                found[f"{str(dtype)[6:]} {activation} {part}"] = (t, allowed)
    return found


def rope(device: str) -> Results:
    """Run rope on transposed heads of which a part is rotated; several lanes of a warp share a head."""
    found: Results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k = (
            uniform(2, 7, n, 64, seed=n).to(device, dtype).transpose(1, 2).requires_grad_() for n in (4, 2)
        )
        weights = [uniform(64, seed=s).to(device, dtype).requires_grad_() for s in (6, 7)]
        angles = uniform(7, 24, seed=8, scale=3.0).to(device)
        for interleaved in (False, True):
            for norms in ({}, {"q_weight": weights[0], "k_weight": weights[1]}):
                made = shoestring.rope(
                    q,
                    k,
                    angles.cos().to(dtype),
                    angles.sin().to(dtype),
                    rotary_dim=48,
                    interleaved=interleaved,
                    **norms,
                )
                leaves = [q, k, *norms.values()]
                gradients = torch.autograd.grad(
                    made, leaves, [uniform(*t.shape, seed=9).to(device, dtype) for t in made]
                )
                for i, t in enumerate((*made, *gradients)):
                    name = f"rope {interleaved} {len(norms)} {str(dtype)[6:]} {i}"
                    found[name] = (t.detach().contiguous(), 32.0 if dtype == torch.float32 else 1.0)
    return found


CASES: tuple[Callable[[str], Results], ...] = (
    compressed_gradients,
    quantize_8bit_codes,
    quantize_state_4bit_codes,
    quantize_4bit,
    fake_quantize,
    quantize_absmax,
    dequantize_4bit,
    int8,
    optimizers,
    linear_cross_entropy,
    linear_distillation,
    cross_entropy,
    table_of_cases,
    moe_sort,
    grouped_linear,
    moe_experts,
    rope,
    attention,
)


def run(backend: str, file: Path) -> None:
    """Run every case and save its results; if a case raises an error, save the error message instead."""
    if backend == "simt":
        torch.ops.load_library(str(EMULATOR))
    saved: dict[str, Results | str] = {}
    for case in CASES:
        try:
            results = case("cuda" if backend == "cuda" else "cpu")
            saved[case.__name__] = {name: (t.cpu(), allowed) for name, (t, allowed) in results.items()}
        except Exception as error:
            saved[case.__name__] = f"{type(error).__name__}: {error}".split("\n")[0]
            print(f"not ok {case.__name__}: {saved[case.__name__]}")
    torch.save(saved, file)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest distance of two tensors, in units in the last place of the largest element of `b`.

    For integer codes the unit is one code step. If more than the share FLIPPED of the codes differ, the
    distance is infinite.
    """
    if torch.equal(a, b):
        return 0.0
    if a.shape != b.shape or a.dtype != b.dtype or not a.isfinite().equal(b.isfinite()):
        return float("inf")
    apart = (a.double() - b.double()).abs()
    if not a.is_floating_point():
        return apart.max().item() if (apart > 0).double().mean() <= FLIPPED else float("inf")
    return (
        apart.nan_to_num().max() / (torch.finfo(a.dtype).eps * b.double().abs().nan_to_num().max())
    ).item()


def compare(first: Path, second: Path) -> list[dict]:
    """Return one row for each tensor of the two result files, and one for each case that raised an error."""
    rows = []
    one, two = (torch.load(f, weights_only=True) for f in (first, second))
    for case, left in one.items():
        right = two[case]
        if isinstance(left, str) or isinstance(right, str):
            message = left if isinstance(left, str) else right
            rows.append(
                {"case": case, "tensor": None, "error": None, "allowed": 0, "ok": False, "message": message}
            )
            continue
        for name, (a, allowed) in left.items():
            error = distance(a, right[name][0])
            rows.append(
                {
                    "case": case,
                    "tensor": name,
                    "error": error if math.isfinite(error) else None,
                    "allowed": allowed,
                    "ok": error <= allowed,
                }
            )
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], Path(sys.argv[3]))
    else:
        print(json.dumps(compare(Path(sys.argv[2]), Path(sys.argv[3]))))
