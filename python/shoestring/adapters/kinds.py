"""Choose the class that a module gets when an adapter is added to it."""

from typing import Any

from torch import nn

from shoestring.adapters.adapted import AdaptedLayer
from shoestring.adapters.called import called_class
from shoestring.adapters.conv import LoraConv, LoraConv1d, LoraConv2d, LoraConv3d, conv_refusal
from shoestring.adapters.conv1d import IA3TransposedLinear, LoraTransposedLinear, VeraTransposedLinear
from shoestring.adapters.embedding import LoraEmbedding, embedding_refusal
from shoestring.adapters.experts import LoraExperts, experts_class
from shoestring.adapters.ia3 import IA3Linear
from shoestring.adapters.linear import LoraLinear, LowRankLinear
from shoestring.adapters.options import IA3Options, LoraOptions, Options, VeraOptions
from shoestring.adapters.targets import (
    former_class,
    is_conv1d,
    is_linear,
    is_subclass,
    matches,
    refuse_unmatched,
)
from shoestring.adapters.tokens import TokenLayer
from shoestring.adapters.vera import VeraLinear
from shoestring.quantization.quantized_tensor import QuantizedTensor

LINEAR: dict[type[Options], type[AdaptedLayer]] = {
    LoraOptions: LoraLinear,
    VeraOptions: VeraLinear,
    IA3Options: IA3Linear,
}
TRANSPOSED: dict[type[Options], type[AdaptedLayer]] = {
    LoraOptions: LoraTransposedLinear,
    VeraOptions: VeraTransposedLinear,
    IA3Options: IA3TransposedLinear,
}
OTHERS: dict[type[nn.Module], type[AdaptedLayer]] = {
    nn.Embedding: LoraEmbedding,
    nn.Conv1d: LoraConv1d,
    nn.Conv2d: LoraConv2d,
    nn.Conv3d: LoraConv3d,
}


def layer_class(module: nn.Module, options: Options) -> type[AdaptedLayer] | None:
    """Return the class that a module gets with an adapter of these options; None if it is not supported."""
    if is_linear(module):
        return LINEAR[type(options)]
    if is_conv1d(module):
        return TRANSPOSED[type(options)]
    if not isinstance(options, LoraOptions):
        return None
    if is_subclass(module, nn.Linear) or is_subclass(module, nn.Embedding):
        # called_class is cached, so its argument must be hashable. mypy rejects the class, because it checks
        # whether the class's instances are hashable.
        return called_class(former_class(module))  # type: ignore[arg-type]
    return OTHERS.get(former_class(module))


def expert_classes(model: nn.Module, options: Options) -> dict[str, type[LoraExperts]]:
    """Return the new class of each module with a parameter named in ``target_parameters``, by module name.

    Raises:
        ValueError: a name matches no parameter, or a parameter is neither a dense floating-point weight of 2 or 3
            dimensions nor a quantised stack.
    """
    targets = options.target_parameters if isinstance(options, LoraOptions) else ()
    classes = {}
    parameters: dict[str, Any] = {}
    for name, module in model.named_modules() if targets else ():
        keys = tuple(
            key
            for key, p in module._parameters.items()
            if p is not None and matches(f"{name}.{key}", targets)
        )
        if keys and name:
            # experts_class is cached, so its arguments must be hashable. mypy rejects the class argument,
            # because it checks whether the class's instances are hashable.
            classes[name] = experts_class(former_class(module), keys)  # type: ignore[arg-type]
            parameters |= {f"{name}.{key}": module._parameters[key] for key in keys}
    missing = [target for target in targets if not any(matches(name, [target]) for name in parameters)]
    if missing:
        known = [name for name, _ in model.named_parameters() if "." in name]
        refuse_unmatched("target_parameters", missing, known, what="names of parameters")
    for name, parameter in parameters.items():
        if (
            parameter.dim() not in (2, 3)
            or not parameter.is_floating_point()
            or type(parameter) not in (nn.Parameter, *([QuantizedTensor] if parameter.dim() == 3 else []))
        ):
            raise ValueError(
                "lora.apply: target_parameters: expected dense weights of 2 or 3 dimensions or quantised stacks of experts, "
                f"received {name}, {tuple(parameter.shape)}"
            )
    return classes


def refusal(module: nn.Module, kind: type[AdaptedLayer], options: Options) -> str | None:
    """Return None if this adapter can be added to the layer, else a phrase for an error message.

    The phrase names the layers or the adapter options that are supported.
    """
    if issubclass(kind, (LoraLinear, IA3Linear, TokenLayer)) or not isinstance(options, LoraOptions):
        return None
    if options.changes_base:
        return f"linear layers for {options.init!r}"
    if options.init == "orthogonal" and not issubclass(kind, (LoraEmbedding, LowRankLinear)):
        return "linear layers and embeddings for 'orthogonal'"
    if issubclass(kind, LoraExperts):
        plain = not options.dora and not options.lora_bias
        return None if plain else "no dora and lora_bias with target_parameters"
    if issubclass(kind, LoraEmbedding):
        return embedding_refusal(module, options)
    return conv_refusal(module) if issubclass(kind, LoraConv) else None
