"""Add adapters to the layers of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn

from shoestring.adapters.adapted import DEFAULT, AdaptedLayer, attach
from shoestring.adapters.experts import LoraExperts
from shoestring.adapters.initialize import Form, take_out
from shoestring.adapters.kinds import expert_classes, layer_class, refusal
from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.moe import with_experts
from shoestring.adapters.options import (
    IA3Options,
    LoraOptions,
    Options,
    VeraOptions,
    VirtualOptions,
    check_name,
)
from shoestring.adapters.peft_config import from_peft
from shoestring.adapters.switch import adapter_names, members, set_adapter
from shoestring.adapters.targets import (
    all_linear,
    base_modules,
    by_pattern,
    find_targets,
    former_class,
    is_conv1d,
    is_linear,
    is_saved,
    matches,
    output_head,
    refuse_unmatched,
)
from shoestring.adapters.tied import tie_copies, tied_modules, untie_weight
from shoestring.adapters.tokens import TokenLayer, token_targets
from shoestring.adapters.trained_copy import TrainedCopy, wrap
from shoestring.adapters.vera import share
from shoestring.adapters.virtual_tokens import attach_tokens, start
from shoestring.core.module_argument import check_module
from shoestring.core.presence import expect_here, weights_present
from shoestring.core.stacks import switch_to_codes
from shoestring.quantization.quantized_linear_module import (
    QuantizedLinear,
    check_dtype,
    check_form,
    quantize_weight,
)
from shoestring.quantization.quantized_stacks import (
    Stack,
    dense_stacks,
    hold_codes,
    quantize_slabs,
    slabs_of,
    split_by_refusal,
    warn_of_dense,
)
from shoestring.quantization.quantized_tensor import QuantizedTensor


def apply(
    model: nn.Module,
    config: Any = None,
    *,
    adapter_name: str = DEFAULT,
    quantize: str | None = None,
    double_quant: bool = False,
    block_size: int | None = None,
    **options: Any,
) -> nn.Module:
    """Freeze a model and add a trainable adapter to its layers, in place. A second call adds another adapter.

    Args:
        model: any module.
        config: :class:`LoraOptions`, :class:`VeraOptions`, :class:`IA3Options`, :class:`PrefixOptions` or
            :class:`PromptOptions`; or a PEFT configuration object for one of these methods. None: LoRA with
            ``options``.
        adapter_name: name of the new adapter, which becomes the only active one; see :func:`set_adapter`.
        quantize: None, or "nf4", "fp4", "int4" or "int8", to quantise weights to 4 bits (QLoRA, arXiv
            2305.14314) or int8. This quantises every linear layer and the stacks of experts, with or without an adapter,
            one after the other. The output head and modules_to_save are not quantised. A warning names stacks that stay
            dense, and why: their gate is none of :func:`moe_experts`, or blocks do not fit. :func:`count_experts` counts
            the experts.
        double_quant: quantise the scales of 4-bit weights to 8 bits (double quantisation). Not with "int4"
            and "int8".
        block_size: number of elements of a 4-bit weight that share a scale: a power of two from 32 to 4096;
            None is 64. Not with "int8", which has one scale per row.
        options: the arguments of :class:`LoraOptions`, which may be given instead of ``config``: rank, alpha,
            target_modules, dora, ...

    Returns:
        The model. Adapters are fp32 (fp64 for fp64 weights), whatever the dtype of the base. The random
        numbers are drawn in the same order as in PEFT, so the same torch seed gives the same initial values.

    Raises:
        TypeError: LoRA has no option of that name.
        ValueError: an option is out of range or, in a PEFT configuration, not supported; a name or pattern
            matches nothing; a target cannot have an adapter of this kind; or the model has an adapter of that
            name already.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        >>> model = shoestring.lora.apply(model, rank=4, target_modules=["0"], quantize="nf4")
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['0.lora_A.default', '0.lora_B.default']
    """
    check_module("lora.apply", model)
    if config is not None and options:
        raise ValueError(
            f"lora.apply: {next(iter(options))}: expected the option inside config, since config is given; "
            "received it as an argument"
        )
    if config is None:
        _check_names(options)
        config = LoraOptions(**options)
    chosen = config if isinstance(config, Options) else from_peft(config, model)
    if isinstance(chosen, LoraOptions):
        chosen = with_experts(model, chosen)
    check_name(adapter_name)
    if adapter_name in adapter_names(model):
        raise ValueError(
            f"lora.apply: adapter_name: expected a new name, but the model has an adapter {adapter_name!r}; "
            "merge or delete it first"
        )
    plan = _plan(model, chosen)
    saved, tied = saved_modules(model, chosen), tied_modules(model, chosen)
    _add_tokens(model, chosen, plan, saved)
    tokens = start(model, chosen) if isinstance(chosen, VirtualOptions) else None
    _check_quantize(model, quantize, block_size, double_quant)

    def is_dense(layer: Any) -> bool:
        dense = is_linear(layer) and not isinstance(layer, (QuantizedLinear, AdaptedLayer))
        return dense and layer is not output_head(model)

    changes = [n for n, (_, _, o) in plan.items() if isinstance(o, LoraOptions) and o.changes_base]
    trained_parts = tuple(f"{name}." for name in saved)
    stacks: dict[str, Stack] = {}
    reasons: dict[str, str] = {}
    if quantize is not None:
        switch_to_codes(model)
        found = {n: s for n, s in dense_stacks(model).items() if not n.startswith(trained_parts)}
        stacks, reasons = split_by_refusal(found, quantize, block_size)
        changes += [name for name, layer in all_linear(model).items() if is_dense(layer)]
        changes += [name.rpartition(".")[0] for name in stacks]
    expect_here("lora.apply", model, (*changes, *saved))

    model.requires_grad_(False)

    def quantized(layer: Any) -> None:
        if quantize is not None and is_dense(layer):
            quantize_weight(layer, quantize, block_size, double_quant)
            layer.__class__ = QuantizedLinear
            layer.compute_dtype = None

    initial = {}
    for name, (layer, _, layer_options) in plan.items():
        # The product of the adapter's initial values is subtracted from the dense weight. Only the remainder
        # is quantised.
        if isinstance(layer_options, LoraOptions) and layer_options.changes_base:
            untie_weight(model, name)
            initial[name] = take_out(layer, layer_options, _form(layer, quantize, block_size, double_quant))
            quantized(layer)
    for name, layer in all_linear(model).items():
        # The modules in modules_to_save stay dense, because they are trained. So do the weights with adapters of
        # target_parameters.
        trained = any(name == whole or name.startswith(whole + ".") for whole in saved)
        if not trained and not (name in plan and issubclass(plan[name][1], LoraExperts)):
            quantized(layer)
    for stack in stacks.values():
        dense = stack.tensor
        hold_codes(
            stack,
            quantize_slabs(
                slabs_of(dense),
                dense.shape,
                dense.dtype,
                dense.device,
                str(quantize),
                block_size,
                double_quant,
            ),
        )
    warn_of_dense("lora.apply: quantize", reasons)
    for name, (layer, kind, layer_options) in plan.items():
        adapted = attach(layer, kind)
        with weights_present(layer):  # DoRA reads the weight
            adapted.add(adapter_name, layer_options, adapted.start(layer_options) | initial.get(name, {}))
        source = getattr(layer_options, "tied_to", None)
        if isinstance(adapted, TokenLayer) and source is not None:
            adapted.tie(model.get_submodule(source))
        if name in initial:
            assert isinstance(adapted, LoraLinear)
            adapted.keep_initial(adapter_name)
    if isinstance(chosen, VeraOptions):
        share([layer for layer, _, _ in plan.values()], adapter_name, chosen, None)  # type: ignore[misc]
    if tokens is not None and isinstance(chosen, VirtualOptions):
        attach_tokens(model, adapter_name, chosen, *tokens)
    for name in saved:
        wrap(model, name).add(adapter_name, chosen)
    tie_copies(model, tied, adapter_name)
    set_adapter(model, adapter_name)
    # inference_mode is an option of PEFT's objects alone. As in PEFT, virtual tokens ignore it.
    if getattr(config, "inference_mode", False) and tokens is None:
        model.requires_grad_(False)
    return model


def _add_tokens(model: nn.Module, options: Options, plan: dict[str, Any], saved: Sequence[str]) -> None:
    """Add the layers of ``trainable_token_indices`` to the plan.

    Raises:
        ValueError: such a layer has an adapter or is in modules_to_save, or the plan has no other layer.
    """
    targets = token_targets(model, options)
    for name, (kind, token_options) in targets.items():
        check_fits(name, model.get_submodule(name), kind, token_options)
        if name in plan or name in saved:
            raise ValueError(
                "lora.apply: trainable_token_indices: expected layers that are not in target_modules or modules_to_save, "
                f"received {name}"
            )
    if targets and not plan:
        raise ValueError(
            "lora.apply: target_modules: expected modules besides those of trainable_token_indices, received none"
        )
    plan |= {name: (model.get_submodule(name), *target) for name, target in targets.items()}


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError, with the names that exist, if an option is not one of LoraOptions."""
    known = [field.name for field in fields(LoraOptions)]
    for name in options:
        if name not in known:
            peft = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_dora": "dora"}.get(
                name
            )
            raise TypeError(
                f"lora.apply: {name}: expected one of the options {', '.join(known)}, received another"
                + (f"; PEFT's {name} is {peft} here" if peft else "")
            )


def options_of_layer(options: Options, name: str, kind: type[AdaptedLayer]) -> Options:
    """Return the options of one layer, whose rank and alpha may come from rank_pattern and alpha_pattern.

    The patterns are matched against the layer's name; for a mixture of experts, against its parameters'
    names. The patterns of the returned options then hold the rank and alpha of each parameter.
    """
    if isinstance(options, IA3Options):
        return replace(options, feedforward=matches(name, options.feedforward_modules))
    if not isinstance(options, LoraOptions):
        return options
    ranks = {key: by_pattern(options.rank_pattern, key, options.rank) for key in _matched_names(name, kind)}
    alphas = {key: by_pattern(options.alpha_pattern, key, options.alpha) for key in ranks}
    layer_options = replace(options, rank=next(iter(ranks.values())), alpha=next(iter(alphas.values())))
    if not issubclass(kind, LoraExperts):
        return layer_options
    last = [key.rpartition(".")[2] for key in ranks]
    return replace(
        layer_options,
        rank_pattern=dict(zip(last, ranks.values(), strict=True)),
        alpha_pattern=dict(zip(last, alphas.values(), strict=True)),
    )


def saved_modules(model: nn.Module, options: Options) -> list[str]:
    """Return the names of the modules that ``modules_to_save``, ``task_type`` and ``ensure_weight_tying`` add.

    Raises:
        ValueError: a name matches no module, or a module contains adapters or quantised weights.
    """
    modules = base_modules(model)
    targets = (*options.modules_to_save, *options.heads)
    tied = tied_modules(model, options)
    ties = {*tied, *tied.values()}
    saved = {name: module for name, module in modules.items() if is_saved(name, targets) or name in ties}
    # PEFT's files list the names of all heads that the task may have. A model has only one of them.
    required = [name for name in options.modules_to_save if name not in options.heads]
    refuse_unmatched(
        "modules_to_save", required, [n for n in modules if n], lambda n, end: is_saved(n, [end])
    )
    for name, module in saved.items():
        inside = [m for m in module.modules() if isinstance(m, (AdaptedLayer, QuantizedLinear))]
        if inside and not isinstance(module, TrainedCopy):
            raise ValueError(
                "lora.apply: modules_to_save: expected modules without adapters or quantised weights, "
                f"received {name}, which has a {type(inside[0]).__name__}"
            )
    return list(saved)


def _plan(model: nn.Module, options: Options) -> dict[str, tuple[nn.Module, type[AdaptedLayer], Options]]:
    """Return a dict from the name of each layer that gets an adapter to (module, new class, options).

    Raises:
        ValueError: the options do not fit the model, or conflict with adapters that the model already has.
    """
    plan = {}
    kinds: dict[str, type[AdaptedLayer]] = {
        name: layer_class(module, options)  # type: ignore[misc]
        for name, module in find_targets(model, options, lambda m: layer_class(m, options)).items()
    }
    kinds |= expert_classes(model, options)
    _refuse_unmatched_patterns(options, kinds)
    for name, kind in kinds.items():
        module, layer_options = model.get_submodule(name), options_of_layer(options, name, kind)
        check_fits(name, module, kind, layer_options)
        check_together(module, layer_options, name)
        plan[name] = (module, kind, layer_options)
    biases = next(
        (m.adapters for m in members(model).values() if any(o.bias != "none" for o in m.adapters.values())),
        None,
    )
    if biases and options.bias != "none":
        raise ValueError(
            f"lora.apply: bias: expected 'none', since the adapter {next(iter(biases))!r} trains the base's biases, "
            f"received {options.bias!r}"
        )
    return plan


def _refuse_unmatched_patterns(options: Options, kinds: dict[str, type[AdaptedLayer]]) -> None:
    """Raise a ValueError if an entry of an option such as rank_pattern matches no layer with an adapter."""
    if isinstance(options, IA3Options):
        refuse_unmatched(
            "feedforward_modules", options.feedforward_modules, kinds, what="names among target_modules"
        )
    if isinstance(options, LoraOptions):
        names = [matched for name, kind in kinds.items() for matched in _matched_names(name, kind)]
        for argument in ("rank_pattern", "alpha_pattern"):
            refuse_unmatched(
                argument, getattr(options, argument), names, lambda name, key: by_pattern({key: True}, name, False),
                "patterns for names of layers with an adapter",
            )  # fmt: skip


def _matched_names(name: str, kind: type[AdaptedLayer]) -> list[str]:
    """Return the names that rank_pattern is matched against: the layer's, or its expert parameters'."""
    return [f"{name}.{target}" for target in kind.TARGETS] if issubclass(kind, LoraExperts) else [name]


def check_fits(name: str, module: nn.Module, kind: type[AdaptedLayer], options: Options) -> None:
    """Raise a ValueError if the layer ``module`` cannot have an adapter with these options."""
    if isinstance(module, AdaptedLayer) and type(module) is not kind:
        raise ValueError(
            f"lora.apply: config: expected adapters of the kind that {name} has, {type(module).__name__}; received "
            f"{type(options).__name__} for {kind.__name__}"
        )
    expected = refusal(module, kind, options)
    if expected is not None:
        raise ValueError(
            f"lora.apply: config: expected {expected}, received {name}, a {former_class(module).__name__}"
        )


def check_together(module: Any, options: Options, name: str) -> None:
    """Raise a ValueError if one layer cannot have both the new adapter and its present ones.

    DoRA computes norms of the base weight, so a layer with DoRA refuses adapters whose initialisation changes
    the base weight (PiSSA, OLoRA, LoftQ). These initialisations also require a rank of at most the smaller
    dimension of the weight.
    """
    if not isinstance(options, LoraOptions):
        return
    other_options = [o for o in getattr(module, "adapters", {}).values() if isinstance(o, LoraOptions)]
    if (options.dora and any(o.changes_base for o in other_options)) or (
        options.changes_base and any(o.dora for o in other_options)
    ):
        raise ValueError(
            f"lora.apply: dora: expected layers whose base no adapter changes, received {name} for both DoRA and "
            "'pissa', 'olora' or 'loftq'"
        )
    if options.changes_base and options.rank > min(module.weight.shape):
        raise ValueError(
            f"lora.apply: rank: expected at most {min(module.weight.shape)} for {options.init!r}, the smaller side of {name}; "
            f"received {options.rank}"
        )


def _form(layer: Any, quantize: str | None, block_size: int | None, double_quant: bool) -> Form:
    """Return the form that a layer's weight will have; a weight that is quantised keeps its form."""
    weight = layer.weight
    if isinstance(weight, QuantizedTensor):
        return weight.quant_type, weight.block_size, weight.nested is not None
    return quantize, weight.shape[1] if quantize == "int8" else block_size or 64, double_quant


def _check_quantize(
    model: nn.Module, quantize: str | None, block_size: int | None, double_quant: bool
) -> None:
    if quantize is None:
        return
    check_form("lora.apply", quantize, block_size, double_quant, "quantize", "None, ")
    for name, layer in all_linear(model).items():
        if is_conv1d(layer):
            raise ValueError(
                f"lora.apply: quantize: expected None for a model with Conv1D layers, such as {name}, received {quantize!r}; "
                "only nn.Linear can be quantised"
            )
        check_dtype("lora.apply", "quantize", layer.weight.dtype, f" in {name}")
