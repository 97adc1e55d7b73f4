"""Let transformers models use shoestring's experts by ``experts_implementation="shoestring"``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left
from shoestring.core.stacks import Reader, readers
from shoestring.experts.experts_module import ACTIVATIONS
from shoestring.experts.grouped_experts import gated, grouped_experts
from shoestring.experts.moe_experts import run_stacks

NAME = "shoestring"
# names of the attributes in which experts of transformers have the limit of their gate
LIMITS = ("limit", "swiglu_limit")


def register_experts() -> str:
    """Register ``experts_implementation="shoestring"`` with transformers and return that name.

    Use the name as ``from_pretrained(..., experts_implementation=shoestring.register_experts())``, or with
    ``model.set_experts_implementation``. The experts of every model that transformers can switch become one call of
    :func:`moe_experts`. They become calls of :func:`grouped_linear`, with the module's own gate between them, if

    - the gate is none of those of :func:`moe_experts`, which a trial on some numbers decides, or
    - the experts have no gate, or a norm after each expert.

    Adapters are multiplied by the tokens of each expert, and no weight is merged. Stacks may be transposed, and have biases or interleaved gates (gpt-oss). Experts with an index of ``num_experts``
    or more, which expert parallelism uses for experts of other processes, are left out.

    Returns:
        The name "shoestring".

    Raises:
        ImportError: transformers is not installed, or older than 5.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
        >>> model.set_experts_implementation(shoestring.register_experts())
        >>> model(torch.tensor([[1, 2, 3, 4]])).logits.shape
        torch.Size([1, 4, 32])
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    return NAME


def run_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of a module, with the signature of transformers' functions of experts.

    Args:
        module: the module of the experts, of a class with ``use_experts_implementation``.
        hidden_states: (tokens, features).
        top_k_index: (tokens, top_k), integers: the experts of each token; ``num_experts`` or more is no expert.
        top_k_weights: (tokens, top_k).

    Returns:
        (tokens, features), in the dtype of ``hidden_states``.
    """
    one: Any = module
    up = one.gate_up_proj if one.has_gate else one.up_proj
    up_bias = None if not one.has_bias else one.gate_up_proj_bias if one.has_gate else one.up_proj_bias
    down, down_bias = one.down_proj, one.down_proj_bias if one.has_bias else None
    index = top_k_index.long()
    index = index.masked_fill(index >= up.shape[0], -1)
    gate = None if not one.has_gate or one.has_post_expert_norm else gate_of(module)
    if gate is not None:
        y = run_stacks(
            hidden_states,
            index,
            top_k_weights,
            up,
            down,
            gate_up_bias=up_bias,
            down_bias=down_bias,
            transposed=one.is_transposed,
            **gate._asdict(),
        )
        return y.to(hidden_states.dtype)
    y = grouped_experts(
        hidden_states,
        index,
        top_k_weights,
        up,
        down,
        one._apply_gate if one.has_gate else one.act_fn,
        up_bias=up_bias,
        down_bias=down_bias,
        transposed=one.is_transposed,
        norm=one.post_expert_norm if one.has_post_expert_norm else None,
    )
    return y.to(hidden_states.dtype)


class Gate(NamedTuple):
    """The options of :func:`moe_experts` that describe a gate."""

    activation: str
    limit: float | None
    interleaved: bool


_gates: weakref.WeakKeyDictionary[nn.Module, Gate | None] = weakref.WeakKeyDictionary()


def gate_of(module: nn.Module) -> Gate | None:
    """Return the gate of a module of experts; None if :func:`moe_experts` does not compute it.

    The module's own gate runs once, on some numbers.
    """
    if module not in _gates:
        _gates[module] = _find_gate(module)
    return _gates[module]


def _find_gate(module: Any) -> Gate | None:
    """Return the gate that gives the results of the module's own gate."""
    own = [getattr(module, name, None) for name in LIMITS]
    limits = [None, *(float(limit) for limit in own if isinstance(limit, (int, float)))]
    # numbers around 0, where the activations differ, and others that every limit clamps
    line = torch.cat([torch.linspace(-6, 6, 49), torch.tensor([-1e4, -99.0, 99.0, 1e4])])
    g, u = (t.flatten() for t in torch.meshgrid(line, line, indexing="ij"))
    allowed = 1e-5 * (1 + g.abs()) * (1 + u.abs())
    for interleaved in (False, True):
        pairs = torch.stack([g, u], -1).flatten() if interleaved else torch.cat([g, u])
        try:
            with torch.no_grad():
                theirs = module._apply_gate(pairs[None])[0]
        except Exception:  # a gate with parameters, or on another device
            return None
        for activation in ACTIVATIONS:
            for limit in limits:
                if torch.all((gated(pairs, activation, limit, interleaved) - theirs).abs() <= allowed):
                    return Gate(activation, limit, interleaved)
    return None


def is_experts(module: nn.Module) -> bool:
    """Return whether transformers can switch the implementation of a module of experts."""
    return hasattr(module, "_is_expert_parallel")


def _reads_stacks(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == NAME


def _refusal_of_codes(module: Any) -> str | None:
    if not _reads_stacks(module):
        return f"transformers cannot switch the experts implementation of {type(module).__name__}"
    if not module.has_gate or module.has_post_expert_norm or gate_of(module) is None:
        return f"moe_experts does not compute the gate or norm of {type(module).__name__}"
    return None


def _switch(model: Any) -> None:
    """Set the experts implementation of a model to shoestring's, the only one that can read codes."""
    if not all(_reads_stacks(module) for module in model.modules() if is_experts(module)):
        for part in model.modules():
            if hasattr(part, "set_experts_implementation"):
                part.set_experts_implementation(register_experts())
                return


readers.append(Reader(is_experts, _reads_stacks, _refusal_of_codes, _switch))


def use_experts(model: Any, check: Callable[[], object]) -> tuple[list[Found], list[Left]]:
    """Set a model's experts implementation to shoestring's; revert it if the function ``check`` raises.

    Returns:
        Two lists: the change (empty if the model has no experts that transformers can switch), and the reason why
        nothing changed if ``check`` raised.
    """
    if not any(is_experts(module) for module in model.modules()):
        return [], []
    before, where = model.get_experts_implementation(), type(model).__name__
    undo = functools.partial(model.set_experts_implementation, before)
    model.set_experts_implementation(register_experts())
    if (
        NAME not in model.get_experts_implementation().values()
    ):  # transformers could not read the model's code
        return [], []
    try:
        check()
    except Exception as error:
        undo()
        return [], [(where, f"experts that compute something else: {error}")]
    return [(where, "experts of shoestring", undo)], []
