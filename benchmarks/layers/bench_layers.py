"""Time norms, rotary embedding and gated activations: shoestring, plain PyTorch, and a limit.

The tables show forward alone, and forward plus backward. Their rate counts every tensor that must be read or
written once. The row "limit" is a sequence of PyTorch's elementwise operators that read and write as many
tensors. Like the layers, these operators allocate their results.

The row "eager" is the code that models usually contain. A row "PyTorch" is PyTorch's own operator, if there
is one. With --device cuda, CUDA graphs are timed. The option --bare leaves out "eager" and "PyTorch". Their
allocations slow down later calls, because they leave cold caches and fewer mapped pages.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from benchmarks.common import Candidates, Report, arguments, graphed, interleave, rotate
from tests.references.layers import (
    add_layer_norm_reference,
    add_rms_norm_reference,
    geglu_reference,
    gelu_reference,
    rms_norm_reference,
    rope_reference,
    swiglu_reference,
)

EPS = 1e-6
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def probe(reads: int, writes: int) -> Function:
    """Return a function that reads `reads` tensors and writes `writes` tensors of its arguments' size."""

    def run(*t: Tensor) -> Tensor:
        made = (
            t[0].neg()
            if reads == 1
            else torch.add(t[0], t[1])
            if reads == 2
            else torch.addcmul(t[0], t[1], t[2])
        )
        for _ in range(writes - 1):
            made = torch.full_like(t[0], 1.0)
        return made

    return run


def step(
    function: Function, leaves: list[Tensor], grads: list[Tensor], backward: bool
) -> Callable[[], object]:
    if not backward:
        plain = [t.detach() for t in leaves]
        return lambda: function(*plain)

    def run() -> object:
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, grads)

    return run


class Layer:
    """A layer to time: its implementations, and the shapes of its inputs.

    Args:
        name: name of the layer.
        functions: implementations by name; the first one is shoestring's.
        big: shapes of the large inputs.
        results: number of results; their shapes are those of the first large inputs.
        small: shapes of the small inputs, such as weights, which follow the large inputs.
        streams: (number of tensors read, number of tensors written), for forward and for backward.
    """

    def __init__(
        self,
        name: str,
        functions: dict[str, Function],
        big: list[tuple[int, ...]],
        results: int,
        small: list[tuple[int, ...]],
        streams: tuple[tuple[int, int], tuple[int, int]],
    ) -> None:
        self.name = name
        self.functions = functions
        self.big = big
        self.results = results  # number of results, whose shapes are those of the first large inputs
        self.small = small
        self.streams = streams  # ((read, written) in forward, (read, written) in backward)


def angles(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(x.shape[-2], device=x.device)[:, None] * torch.logspace(
        0, -4, width // 2, device=x.device
    )
    positions = torch.cat([positions, positions], -1)
    return positions.cos().to(x.dtype), positions.sin().to(x.dtype)


def layers(tokens: int, features: int) -> list[Layer]:
    size, vector = (tokens, features), (features,)
    # (batch, tokens, heads, head_dim), as projections return queries and keys; attention transposes tokens
    # and heads
    heads = (1, tokens, features // 64, 64)
    norm = {
        "shoestring": lambda x, w: shoestring.rms_norm(x, w, eps=EPS),
        "eager": lambda x, w: rms_norm_reference(x, w, eps=EPS),
        "PyTorch rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, EPS),
    }
    add = {
        "shoestring": lambda x, r, w: shoestring.add_rms_norm(x, r, w, eps=EPS),
        "eager": lambda x, r, w: add_rms_norm_reference(x, r, w, eps=EPS),
    }
    layer = {
        "shoestring": lambda x, w, b: shoestring.layer_norm(x, w, b, eps=EPS),
        "eager": eager_layer_norm,
        "PyTorch layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
    }
    add_layer = {
        "shoestring": lambda x, r, w, b: shoestring.add_layer_norm(x, r, w, b, eps=EPS),
        "eager": lambda x, r, w, b: add_layer_norm_reference(x, r, w, b, eps=EPS),
    }
    rope = {"shoestring": rotary(shoestring.rope), "eager": rotary(rope_reference)}
    return [
        Layer("rms_norm", norm, [size], 1, [vector], ((1, 1), (2, 1))),
        Layer("add_rms_norm", add, [size, size], 2, [vector], ((2, 2), (3, 1))),
        Layer("layer_norm", layer, [size], 1, [vector, vector], ((1, 1), (2, 1))),
        Layer("add_layer_norm", add_layer, [size, size], 2, [vector, vector], ((2, 2), (3, 1))),
        Layer("rope", rope, [heads, heads], 2, [], ((1, 1), (1, 1))),
        Layer(
            "swiglu",
            {"shoestring": shoestring.swiglu, "eager": swiglu_reference},
            [size, size],
            1,
            [],
            ((2, 1), (3, 2)),
        ),
        Layer(
            "geglu",
            {"shoestring": shoestring.geglu, "eager": geglu_reference},
            [size, size],
            1,
            [],
            ((2, 1), (3, 2)),
        ),
        Layer(
            "gelu",
            {"shoestring": shoestring.gelu, "eager": gelu_reference},
            [size],
            1,
            [],
            ((1, 1), (2, 1)),
        ),
    ]


def eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    apart = wide - wide.mean(-1, keepdim=True)
    return (apart * (apart.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight + bias).to(x.dtype)


def rotary(function: Function) -> Function:
    kept: list[Tensor] = []

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if not kept or kept[0].device != q.device or kept[0].dtype != q.dtype:
            kept[:] = angles(q, q.shape[-1])
        return function(q, k, *kept)

    return run


def candidate(
    layer: Layer, function: Function, dtype: torch.dtype, device: str, backward: bool
) -> Callable[[], object]:
    leaves = [
        torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in (*layer.big, *layer.small)
    ]
    shapes = [t.shape for t in leaves[: layer.results]]
    if layer.name == "rope":
        shapes = [torch.Size((s[0], s[2], s[1], s[3])) for s in shapes]
    grads = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    if layer.name == "rope":  # give the gradients of q and k the strides that attention's backward returns
        grads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    return step(function, leaves, grads, backward)


def limit(layer: Layer, dtype: torch.dtype, device: str, backward: bool) -> Callable[[], object]:
    """Return a function with the memory traffic of a layer's forward, plus its backward if `backward`.

    For rope, the function moves the tensors of the queries, and then those of the keys.
    """
    buffers = [torch.randn(layer.big[0], device=device).to(dtype) for _ in range(3)]
    runs = [probe(*streams) for streams in layer.streams[: 2 if backward else 1]]
    runs = runs * (2 if layer.name == "rope" else 1)
    return lambda: [run(*buffers) for run in runs]


def main() -> None:
    options = arguments(
        __doc__.splitlines()[0],
        devices=("cpu", "cuda"),
        more=lambda parser: parser.add_argument(
            "--bare", action="store_true", help="ours and the limit alone"
        ),
    )
    report = Report("layers", options)
    shapes = (
        [(4096, 2048), (512, 768)] if options.device == "cpu" else [(8192, 4096), (8192, 1024), (512, 768)]
    )
    for tokens, features in [(64, 128)] if options.quick else shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for layer in layers(tokens, features):
                for backward in (False, True):
                    streams = sum(sum(s) for s in layer.streams[: 2 if backward else 1]) * (
                        2 if layer.name == "rope" else 1
                    )
                    size = tokens * features * dtype.itemsize
                    makers: dict[str, Callable[[], Callable[[], object]]] = {
                        name: lambda f=f, layer=layer, dtype=dtype, backward=backward: candidate(
                            layer, f, dtype, options.device, backward
                        )
                        for name, f in layer.functions.items()
                        if name == "shoestring" or not options.bare
                    }
                    makers["limit: the same streams"] = lambda layer=layer, dtype=dtype, backward=backward: (
                        limit(layer, dtype, options.device, backward)
                    )
                    if options.device == "cuda":
                        makers = {name: lambda make=make: graphed(make()) for name, make in makers.items()}
                    candidates: Candidates = {
                        name: rotate(make, 2 * size, options.device) for name, make in makers.items()
                    }
                    times = interleave(candidates, options.repeats, options.device)
                    what = "forward + backward" if backward else "forward"
                    title = f"{layer.name}, {tokens} x {features}, {str(dtype)[6:]}, {what}"
                    report.table(title, times, streams * size / 1e9, "GB/s")
    report.finish()


if __name__ == "__main__":
    main()
