"""Make mixtures of experts of the dense MLPs of a trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.blocks.gated_mlp import ACTIVATIONS, GatedMLP
from shoestring.core.module_argument import check_module
from shoestring.experts.grouped_experts import gated
from shoestring.experts.moe_module import MoE
from shoestring.experts.moe_route import MoeRoute
from shoestring.experts.router_module import is_recomputed
from shoestring.gemm.dense import is_plain

PARTS = ("gate_proj", "up_proj", "down_proj")


class UpcycledMLP(MoE):
    """A mixture of experts in the place of a MLP: forward returns the output alone, and ``route`` is the last route."""

    route: MoeRoute | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y, route = super().forward(x)
        if not is_recomputed():
            self.route = route
        return y

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "route"}  # has an autograd graph


@dataclass
class UpcycleReport:
    """The result of ``upcycle``.

    Attributes:
        modules: the new modules by name, of a subclass of :class:`shoestring.nn.MoE` whose forward returns the output
            alone. ``route`` is the :class:`MoeRoute` of the last forward, for the losses.
        left: MLPs that stay dense, with the reason.

    Example:
        >>> model = torch.nn.Sequential(shoestring.nn.GatedMLP(8, 16))
        >>> report = shoestring.upcycle(model, 4, 2)
        >>> y = model(torch.randn(3, 8))
        >>> balance = sum(moe.route.balance for moe in report.modules.values())
        >>> balance.shape, report.left
        (torch.Size([]), {})
    """

    modules: dict[str, Any] = field(default_factory=dict)  # UpcycledMLP, which has no page of its own
    left: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def upcycle(
    model: nn.Module, num_experts: int, top_k: int, *, granularity: int = 1, reinitialize: float = 0.0
) -> UpcycleReport:
    """Replace the gated MLPs of a model by mixtures of experts that compute the same, to train them further.

    The MLPs are :class:`shoestring.nn.GatedMLP` and those of transformers with the layers ``gate_proj``, ``up_proj`` and
    ``down_proj``, such as LlamaMLP. Each expert is a copy (arXiv 2212.05055). Routers are random, and the weights of a
    token are divided by their sum, so the first outputs are those of the dense model within rounding.

    With ``granularity`` g, the hidden features of a MLP are cut into g slices, and num_experts / g experts have each
    slice. The g slices of a copy have equal rows in the router, and the weights are multiplied by g (arXiv 2410.07524).
    A token then has all slices of its top_k / g best copies, so the first outputs are again the dense ones. This does not
    hold for a token for which two copies have equal logits within rounding.

    Args:
        model: the model, which changes in place. Create the optimizer afterwards. The configuration of a transformers
            model does not change, so transformers cannot read its files.
        num_experts: number of experts, a multiple of ``granularity``.
        top_k: number of experts of a token, a multiple of ``granularity``.
        granularity: number of slices; it divides the hidden features of each MLP.
        reinitialize: share of the hidden features of each expert, chosen at random, whose weights are drawn anew from
            normal distributions with their mean and standard deviation (Drop-Upcycling, arXiv 2502.19261). The experts
            then differ, and the first outputs are no longer those of the dense model.

    Returns:
        A report of the new modules, and of the MLPs that stay dense.

    Raises:
        ValueError: the numbers do not fit, or the model has no MLP that can be replaced. Nothing has changed then.

    Example:
        >>> model = torch.nn.Sequential(shoestring.nn.GatedMLP(8, 16))
        >>> x = torch.randn(3, 8)
        >>> before = model(x)
        >>> report = shoestring.upcycle(model, 8, 4, granularity=2)
        >>> torch.allclose(model(x), before, atol=1e-6)
        True
        >>> report.modules["0"].experts.down_proj.shape
        torch.Size([8, 8, 8])
    """
    check_module("shoestring.upcycle", model)
    for name, value in (("num_experts", num_experts), ("top_k", top_k)):
        if granularity < 1 or value < 1 or value % granularity:
            raise ValueError(
                f"shoestring.upcycle: {name}: expected a multiple of granularity={granularity}, received {value}"
            )
    if top_k > num_experts:
        raise ValueError(
            f"shoestring.upcycle: top_k: expected at most num_experts={num_experts}, received {top_k}"
        )
    if not 0 <= reinitialize <= 1:
        raise ValueError(
            f"shoestring.upcycle: reinitialize: expected a share in [0, 1], received {reinitialize}"
        )
    report = UpcycleReport()
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if all(part in module._modules for part in PARTS):
            activation, reason = _activation(module, granularity)
            if reason:
                report.left[name] = reason
            else:
                found[name] = module, activation
    if not found:
        reasons = "".join(f"; {name or 'the model'}: {reason}" for name, reason in report.left.items())
        raise ValueError(f"shoestring.upcycle: model: expected gated MLPs, received none{reasons}")
    if "" in found:
        raise ValueError(
            "shoestring.upcycle: model: expected a model that contains MLPs, received a MLP; put it into an nn.Sequential"
        )
    made: dict[nn.Module, UpcycledMLP] = {}
    for name, (module, activation) in found.items():
        if module not in made:
            made[module] = _mixture(module, activation, num_experts, top_k, granularity, reinitialize)
        model.set_submodule(name, made[module])
        report.modules[name] = made[module]
    return report


def _activation(module: Any, granularity: int) -> tuple[str, str]:
    """Return the activation of a gated MLP and "", or "" and the reason why it cannot be replaced."""
    layers = [module._modules[part] for part in PARTS]
    others = [part for name, part in module._modules.items() if name not in PARTS]
    if not all(is_plain(layer) for layer in layers):
        return "", "a layer has hooks, adapters or quantised weights"
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        return "", "hooks or a forward of its own"
    if module._parameters or module._buffers or any(any(part.parameters()) for part in others):
        return "", "weights besides the three layers"
    if any(layer.weight.is_meta for layer in layers):
        return "", "weights on the meta device"
    gate, up, down = layers
    if len({layer.bias is None for layer in layers}) > 1:
        return "", "some of the layers have a bias, and others have none"
    if gate.out_features % granularity:
        return "", f"{gate.out_features} hidden features are no multiple of granularity={granularity}"
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, gate.in_features, generator=draw).to(gate.weight.device, gate.weight.dtype)
    line = torch.linspace(-6, 6, 97)
    pairs = torch.cat([line, torch.ones_like(line)])
    training = module.training
    module.eval()
    try:
        theirs = module(x)
        for activation in ACTIVATIONS:
            if isinstance(module, GatedMLP):
                fits = module.activation == activation
            else:
                fits = torch.allclose(module.act_fn(line), gated(pairs, activation, None, False), 1e-5, 1e-5)
            if fits:
                ours = down(gated(torch.cat([gate(x), up(x)], -1), activation, None, False))
                rounding = 64 * torch.finfo(x.dtype).eps
                if (ours.double() - theirs.double()).norm() <= rounding * theirs.double().norm():
                    return activation, ""
    except Exception as error:  # another signature, or an activation with other arguments
        return "", f"no MLP of one tensor: {error}"
    finally:
        module.train(training)
    return "", "an activation that is neither silu nor gelu, or another computation"


def _mixture(
    module: Any, activation: str, num_experts: int, top_k: int, slices: int, reinitialize: float
) -> UpcycledMLP:
    """Return the mixture for a MLP. Expert ``copy * slices + s`` has slice s."""
    gate, up, down = (module._modules[part] for part in PARTS)
    features, hidden, copies = gate.in_features, gate.out_features // slices, num_experts // slices
    moe = UpcycledMLP(
        features,
        hidden,
        num_experts,
        top_k,
        renormalize=True,
        scale=float(slices),
        activation=activation,
        bias=gate.bias is not None,
        device=gate.weight.device,
        dtype=gate.weight.dtype,
    )
    # Equal rows in neighbouring experts: of equal logits, the lowest index is first, so whole copies are chosen.
    moe.router.weight.copy_(moe.router.weight[:copies].repeat_interleave(slices, 0))
    experts: Any = moe.experts
    parts = [layer.weight.view(slices, hidden, features) for layer in (gate, up)]
    experts.gate_up_proj.copy_(torch.cat(parts, 1).repeat(copies, 1, 1))
    experts.down_proj.copy_(down.weight.view(-1, slices, hidden).transpose(0, 1).repeat(copies, 1, 1))
    if gate.bias is not None:
        biases = [layer.bias.view(slices, hidden) for layer in (gate, up)]
        experts.gate_up_proj_bias.copy_(torch.cat(biases, 1).repeat(copies, 1))
        experts.down_proj_bias.copy_((down.bias / slices).expand(num_experts, -1))
    count = round(reinitialize * hidden)
    for e in range(num_experts if count else 0):
        chosen = torch.randperm(hidden, device="cpu")[:count].to(gate.weight.device)
        for weight in (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e].t()):
            old = weight[chosen].double()
            new = old.mean() + old.std(correction=0) * torch.randn_like(old)
            weight[chosen] = new.to(weight.dtype)
    frozen = not gate.weight.requires_grad
    for parameter in experts.parameters():
        parameter.requires_grad_(not frozen)
    return moe.train(module.training)
