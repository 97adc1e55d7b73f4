"""Quantisation-aware training of a model: prepare its linear layers, and quantise them afterwards."""

from collections.abc import Sequence

from torch import nn

from shoestring.adapters.targets import all_linear, base_modules, former_class, matches, refuse_unmatched
from shoestring.core.fast_paths import set_fast_paths
from shoestring.quantization.fake_quantized_linear_module import (
    FakeQuantizedLinear,
    make_fake_quantized,
    make_quantized,
)
from shoestring.quantization.quantized_linear_module import check_dtype, check_form

PREPARE, CONVERT = "prepare_quantized", "convert_quantized"


def prepare_quantized(
    model: nn.Module,
    quant_type: str = "nf4",
    *,
    block_size: int | None = None,
    double_quant: bool = False,
    target_modules: str | Sequence[str] = "all-linear",
    skip_modules: Sequence[str] = (),
) -> nn.Module:
    """Prepare a model for quantisation-aware training, in place.

    The chosen ``nn.Linear`` layers become :class:`shoestring.nn.FakeQuantizedLinear`. Forward computes with
    the weights that the quantised model will have, and the optimizer trains the dense weights, which remain
    the same parameters. ``state_dict`` keeps its keys, so checkpoints of the dense model load. After
    training, call :func:`convert_quantized`.

    Quantisation happens in the dtype in which a layer sees its weight. FSDP2's
    ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` shows it a bf16 weight; convert such a model in bf16.

    Args:
        model: any module with ``nn.Linear`` layers; fp32, bf16 or fp16 weights.
        quant_type: "nf4", "fp4", "int4" or "int8".
        block_size: for 4 bits, the number of weights that share a scale, a power of two from 32 to 4096; None
            is 64. An int8 row has one scale.
        double_quant: for "nf4" and "fp4": also quantise the scales to 8 bits (double quantisation).
        target_modules: "all-linear" for every ``nn.Linear`` except the output head of a transformers model; or
            a list of full names or of their endings after a dot; or a regular expression for full names.
        skip_modules: layers that stay dense: full names, or their endings after a dot.

    Returns:
        The model.

    Raises:
        ValueError: an option is not supported, a name matches nothing, or a chosen module is not an
            ``nn.Linear`` with an fp32, bf16 or fp16 weight. The model is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> model = shoestring.prepare_quantized(model, "int4")
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(16, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> trained = shoestring.fake_quantize(model[0].weight, "int4")
        >>> model = shoestring.convert_quantized(model)
        >>> torch.equal(model[0].weight.dequantize(), trained)
        True

    Reference:
        Bengio, Leonard and Courville, 2013, arXiv 1308.3432: the straight-through estimator.
    """
    check_form(PREPARE, quant_type, block_size, double_quant)
    layers = _chosen(model, target_modules, skip_modules)
    for name, layer in layers.items():
        check_dtype(PREPARE, "model", layer.weight.dtype, f" in {name}")
    for layer in layers.values():
        make_fake_quantized(layer, quant_type, block_size, double_quant)
    set_fast_paths(model)
    return model


def _chosen(
    model: nn.Module, targets: str | Sequence[str], skip_modules: Sequence[str]
) -> dict[str, nn.Linear]:
    """Return the linear layers to prepare, by name."""
    modules = {name: module for name, module in base_modules(model).items() if name}
    refuse_unmatched("skip_modules", skip_modules, modules, caller=PREPARE)
    every = targets == "all-linear"
    if not every:
        refuse_unmatched("target_modules", targets, modules, caller=PREPARE)
    layers = {}
    for name, module in all_linear(model).items() if every else modules.items():
        if matches(name, skip_modules) or not (every or matches(name, targets)):
            continue
        if type(module) is nn.Linear:
            layers[name] = module
        elif not every:
            raise ValueError(
                f"{PREPARE}: target_modules: expected nn.Linear layers, received {name}, a {former_class(module).__name__}"
            )
    if not layers:
        raise ValueError(f"{PREPARE}: model: expected nn.Linear layers to prepare, received none")
    return layers


def convert_quantized(model: nn.Module) -> nn.Module:
    """Quantise the weights of a model that :func:`prepare_quantized` has prepared, in place.

    Each :class:`shoestring.nn.FakeQuantizedLinear` becomes a :class:`shoestring.nn.QuantizedLinear`. Its
    dequantised weight equals, bit for bit, the weight with which the layer has computed. The outputs of the
    model therefore change only by the rounding of matrix products. ``save_quantized`` writes the model, except
    int4, whose ``state_dict`` can be saved.

    The quantised weights are new, frozen tensors; the layers' biases stay the same parameters. Make a new
    optimizer if training goes on, for example with adapters.

    Args:
        model: a model with ``FakeQuantizedLinear`` layers, whose weights are whole tensors on this process.

    Returns:
        The model.

    Raises:
        ValueError: the model has no ``FakeQuantizedLinear`` layers, or a weight is sharded over processes.

    Example:
        >>> layer = shoestring.nn.FakeQuantizedLinear(64, 8, quant_type="nf4")
        >>> model = shoestring.convert_quantized(torch.nn.Sequential(layer))
        >>> model[0]
        QuantizedLinear(in_features=64, out_features=8, bias=True, nf4, block_size=64, double_quant=False)
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLinear)}
    if not layers:
        raise ValueError(
            f"{CONVERT}: model: expected FakeQuantizedLinear layers, received none; call {PREPARE} before training"
        )
    for name, layer in layers.items():
        if hasattr(layer.weight, "full_tensor"):
            raise ValueError(
                f"{CONVERT}: model: expected whole weights, received a DTensor in {name}; load the full state dict into a "
                "prepared model that is not sharded, and convert that one"
            )
    for layer in layers.values():
        make_quantized(layer)
    set_fast_paths(model)
    return model
