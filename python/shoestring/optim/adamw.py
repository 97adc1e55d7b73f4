"""AdamW with block-wise 8-bit state."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.ops.adamw import STATE_BLOCK, adamw_

FORMAT_VERSION = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


@dataclass
class _Arena:
    """The state of a group's parameters: one flat tensor a kind, each parameter at a multiple of the block."""

    params: list[Tensor]
    absent: list[Tensor]  # those of the group that have never had a gradient
    step: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor | None


class _AsSaved:
    """Carries a tensor through Optimizer.load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are kept in 8 bits: 2.03 bytes a parameter instead of 8.

    A drop-in for ``torch.optim.AdamW``: parameter groups, schedulers, hooks, closures and state dicts work as there.
    State of any size is quantised, in blocks of 256 elements with an fp32 scale each (arXiv 2110.02861); the
    bytes are those of bitsandbytes, but that a second moment is zero only where it is exactly zero. A step computes in
    fp32 with the moments as they are before quantisation, all tensors of a group in one pass; results do not depend on
    the number of threads.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes over the parameters that have had a gradient, n being their sizes;
    for ``state="fp32"`` 2048 in place of 520. State is made when a parameter first has a gradient.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16. Weights are rounded to nearest: with 16-bit
            weights, updates below half a unit in the last place are lost.
        lr: learning rate; a number, or a tensor of one element. One on the parameters' device is read there by each
            step: a schedule may change it in place (``fill_``) between the replays of a CUDA graph.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled, applied before the update.
        state: "8bit" or "fp32"; a group may have its own.
        maximize: ascend instead.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.
        TypeError: an option of ``torch.optim.AdamW`` that is not supported (amsgrad, foreach, fused, capturable, ...).

    Under ``torch.amp.GradScaler`` the step itself divides the gradients by the scale, and skips without the host having
    to wait where they were not finite. On a GPU a step waits for nothing, and can be captured in a CUDA graph; the
    state has to exist before (one step, outside).

    ``state[p]`` holds ``step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale`` (without the scales for fp32):
    views into memory that the group shares. Change their values in place, or replace them through ``load_state_dict``;
    an entry that is assigned is not seen.
    """

    _step_supports_amp_scaling = True  # GradScaler.step then sets grad_scale and found_inf on the optimizer

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "8bit",
        maximize: bool = False,
    ) -> None:
        self._arenas: dict[int, _Arena] = {}  # by the group's position
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, state=state, maximize=maximize)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim.Optimizer``; its options are checked first."""
        _check_options({**self.defaults, **param_group})
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        seen = set()
        for i, item in enumerate(param_group["params"]):
            param = item[1] if isinstance(item, tuple) else item
            if isinstance(param, Tensor) and param.dtype not in DTYPES:
                raise ValueError(f"AdamW: params[{i}]: expected fp32, bf16 or fp16, received {param.dtype}")
            if id(param) in seen:
                raise ValueError(f"AdamW: params[{i}]: expected each parameter once, received one again")
            seen.add(id(param))
        super().add_param_group(param_group)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient; returns what the closure, if any, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            if all(p.grad is None for p in group["params"]):
                continue
            arena = self._arenas.get(index)
            if (
                arena is None
                or len(arena.params) + len(arena.absent) != len(group["params"])
                or any(p.grad is not None for p in arena.absent)
            ):
                arena = self._arenas[index] = self._make_arena(group)
            beta1, beta2 = group["betas"]
            lr, device = group["lr"], arena.step.device
            on_device = isinstance(lr, Tensor) and lr.device == device
            adamw_(
                arena.params,
                [p.grad for p in arena.params],
                arena.step,
                arena.exp_avg,
                arena.exp_avg_scale,
                arena.exp_avg_sq,
                arena.exp_avg_sq_scale,
                lr=0.0 if on_device else float(lr),
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                lr_tensor=lr.detach().float() if on_device else None,
                grad_scale=_number_on(device, getattr(self, "grad_scale", None)),
                found_inf=_number_on(device, getattr(self, "found_inf", None)),
            )
        return loss

    def _make_arena(self, group: dict[str, Any]) -> _Arena:
        """An arena for the parameters that have state or a gradient; state that there is moves into it."""
        present = [bool(self.state.get(p)) or p.grad is not None for p in group["params"]]
        params = [p for p, here in zip(group["params"], present, strict=True) if here]
        absent = [p for p, here in zip(group["params"], present, strict=True) if not here]
        blocks = sum(_blocks(p) for p in params)
        device, quantized = params[0].device, group["state"] == "8bit"

        def moments() -> Tensor:
            dtype = torch.uint8 if quantized else torch.float32
            return torch.zeros(blocks * STATE_BLOCK, dtype=dtype, device=device)

        def scales() -> Tensor | None:
            return torch.zeros(blocks, dtype=torch.float32, device=device) if quantized else None

        step = torch.zeros(len(params), dtype=torch.float32, device=device)
        arena = _Arena(params, absent, step, moments(), scales(), moments(), scales())
        block = 0
        for i, p in enumerate(params):
            views = {"step": arena.step[i]}
            elements = slice(block * STATE_BLOCK, block * STATE_BLOCK + p.numel())
            views["exp_avg"] = arena.exp_avg[elements].view(p.shape)
            views["exp_avg_sq"] = arena.exp_avg_sq[elements].view(p.shape)
            if arena.exp_avg_scale is not None and arena.exp_avg_sq_scale is not None:
                views["exp_avg_scale"] = arena.exp_avg_scale[block : block + _blocks(p)]
                views["exp_avg_sq_scale"] = arena.exp_avg_sq_scale[block : block + _blocks(p)]
            block += _blocks(p)
            for name, old in self.state.get(p, {}).items():
                views[name].copy_(old)
            self.state[p] = views
        return arena

    def state_dict(self) -> dict[str, Any]:
        """The state as in ``torch.optim.Optimizer``, with the ``format_version`` of the entries."""
        return {**super().state_dict(), "format_version": FORMAT_VERSION}

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, bit for bit whatever the parameters' dtype; everything is copied."""
        version = state_dict.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ValueError(f"AdamW: load_state_dict: expected format_version {FORMAT_VERSION}, received {version!r}")

        def keep(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            entries = {
                key: {k: _AsSaved(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
                for key, entry in loaded["state"].items()
            }
            return {**loaded, "state": entries}

        last = self.register_load_state_dict_pre_hook(keep)  # after those that the user registered
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of a load, a copy or an unpickling, after checking it, and moves it into new arenas."""
        if "state" in state:
            for group in state["param_groups"]:
                for name, default in state.get("defaults", self.__dict__.get("defaults", {})).items():
                    group.setdefault(name, default)
                _check_options(group)
            for param, entry in state["state"].items():
                for name, value in entry.items():
                    entry[name] = value.tensor if isinstance(value, _AsSaved) else value
                group = next((g for g in state["param_groups"] if any(p is param for p in g["params"])), None)
                if group is not None and entry:
                    _check_entry(param, entry, group["state"])
        super().__setstate__(state)
        self._arenas = {}
        for index, group in enumerate(self.param_groups):
            if any(self.state.get(p) for p in group["params"]):
                self._arenas[index] = self._make_arena(group)


def _number_on(device: torch.device, number: Tensor | None) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


def _blocks(param: Tensor) -> int:
    return -(-param.numel() // STATE_BLOCK)


def _check_options(group: dict[str, Any]) -> None:
    def check(name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"AdamW: {name}: expected {expected}, received {group[name]!r}")

    lr = group["lr"]
    check("lr", (not isinstance(lr, Tensor) or lr.numel() == 1) and float(lr) >= 0, "a number of at least 0")
    check("betas", len(group["betas"]) == 2 and all(0 <= b < 1 for b in group["betas"]), "two numbers in [0, 1)")
    check("eps", group["eps"] >= 0, "a number of at least 0")
    check("weight_decay", group["weight_decay"] >= 0, "a number of at least 0")
    check("state", group["state"] in ("8bit", "fp32"), '"8bit" or "fp32"')


def _check_entry(param: Tensor, entry: dict[str, Any], state: str) -> None:
    quantized = state == "8bit"
    moments = torch.uint8 if quantized else torch.float32
    expected = {"step": (torch.float32, ()), "exp_avg": (moments, param.shape), "exp_avg_sq": (moments, param.shape)}
    if quantized:
        expected |= {name: (torch.float32, (_blocks(param),)) for name in SCALES}
    if entry.keys() != expected.keys():
        raise ValueError(
            f'AdamW: load_state_dict: state="{state}" expects the entries {sorted(expected)}, received {sorted(entry)}'
        )
    for name, (dtype, shape) in expected.items():
        value = entry[name]
        if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != torch.Size(shape):
            received = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"AdamW: load_state_dict: {name}: expected {dtype} {tuple(shape)}, received {received}")
