"""What the optimizers share: moments in flat arenas, 8-bit or fp32, and one operator call for all of an arena."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.ops.quantize_8bit import STATE_BLOCK
from shoestring.optim.convert import Moment, blocks, imported

FORMAT_VERSION = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Arena:
    """The state of parameters of one group: one flat tensor a kind, each parameter at a multiple of the block."""

    params: list[Tensor]
    step: Tensor
    moments: list[Tensor | None]  # as the operator takes them: a moment, its scales (None for fp32), the next, ...


@dataclass
class _Layout:
    """A group's arenas, 8-bit and fp32 (or one of them), and the parameters that have never had a gradient."""

    arenas: list[_Arena]
    absent: list[Tensor]

    def holds(self, params: list[Tensor]) -> bool:
        """Whether it still is the layout of this group."""
        count = len(self.absent) + sum(len(arena.params) for arena in self.arenas)
        return count == len(params) and all(p.grad is None for p in self.absent)


class _AsSaved:
    """Carries a tensor through Optimizer.load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class LowMemoryOptimizer(Optimizer):
    """Everything but the rule. A subclass names its moments and its operator, and hands over its options.

    The operator is called as ``operator(params, grads, step, moment, scales, ..., lr=, **rule, maximize=, lr_tensor=,
    grad_scale=, clip_coef=, found_inf=)``, as ``shoestring.ops.adamw_``. Every group has the options ``lr``, ``state``,
    ``min_quantize_size`` and ``maximize`` beside the rule's own.
    """

    _moments: ClassVar[tuple[Moment, ...]]
    _operator: ClassVar[Callable[..., None]]
    _step_supports_amp_scaling = True  # GradScaler.step then sets grad_scale and found_inf on the optimizer

    max_grad_norm: float | None = None
    grad_norm: Tensor | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], max_grad_norm: float | None) -> None:
        positive = max_grad_norm is None or max_grad_norm > 0
        self._expect(positive, "max_grad_norm", "None or a number above 0", max_grad_norm)
        self._layouts: dict[int, _Layout] = {}  # by the group's position
        self.max_grad_norm = max_grad_norm
        super().__init__(params, defaults)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        """The operator's own arguments, from a group's options."""
        raise NotImplementedError

    def _check_rule(self, group: dict[str, Any]) -> None:
        """Raises ValueError (by ``_expect``) where one of the rule's own options does not fit."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _expect(self, good: bool, name: str, expected: str, received: object) -> None:
        if not good:
            raise ValueError(f"{self._name}: {name}: expected {expected}, received {received!r}")

    def _check_options(self, group: dict[str, Any]) -> None:
        lr, size = group["lr"], group["min_quantize_size"]
        positive = (not isinstance(lr, Tensor) or lr.numel() == 1) and float(lr) >= 0
        self._expect(positive, "lr", "a number of at least 0", lr)
        self._check_rule(group)
        self._expect(group["state"] in ("8bit", "fp32"), "state", '"8bit" or "fp32"', group["state"])
        self._expect(isinstance(size, int) and size >= 0, "min_quantize_size", "a whole number of at least 0", size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim.Optimizer``; its options are checked first."""
        self._check_options({**self.defaults, **param_group})
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        seen = set()
        for i, item in enumerate(param_group["params"]):
            param = item[1] if isinstance(item, tuple) else item
            if isinstance(param, Tensor) and param.dtype not in DTYPES:
                raise ValueError(f"{self._name}: params[{i}]: expected fp32, bf16 or fp16, received {param.dtype}")
            if id(param) in seen:
                raise ValueError(f"{self._name}: params[{i}]: expected each parameter once, received one again")
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
        clip_coef = self._clip_coef()
        for index, group in enumerate(self.param_groups):
            if all(p.grad is None for p in group["params"]):
                continue
            layout = self._layouts.get(index)
            if layout is None or not layout.holds(group["params"]):
                layout = self._layouts[index] = self._make_layout(group)
            for arena in layout.arenas:
                lr, device = group["lr"], arena.step.device
                on_device = isinstance(lr, Tensor) and lr.device == device
                type(self)._operator(
                    arena.params,
                    [p.grad for p in arena.params],
                    arena.step,
                    *arena.moments,
                    lr=0.0 if on_device else float(lr),
                    **self._rule(group),
                    maximize=group["maximize"],
                    lr_tensor=lr.detach().float() if on_device else None,
                    grad_scale=_number_on(device, getattr(self, "grad_scale", None)),
                    clip_coef=_number_on(device, clip_coef),
                    found_inf=_number_on(device, getattr(self, "found_inf", None)),
                )
        return loss

    def _clip_coef(self) -> Tensor | None:
        """As ``torch.nn.utils.clip_grad_norm_`` has it, but that the norm of 16-bit gradients is an fp32 number."""
        self.grad_norm = None
        if self.max_grad_norm is None:
            return None
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    by_kind.setdefault((p.grad.device, p.grad.dtype), []).append(p.grad)
        # With its own dtype, the norm of finite fp16 gradients under a loss scale would overflow.
        norms = [n for grads in by_kind.values() for n in torch._foreach_norm(grads, 2, dtype=torch.float32)]
        if not norms:
            return None
        self.grad_norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        scale = _number_on(self.grad_norm.device, getattr(self, "grad_scale", None))
        if scale is not None:
            self.grad_norm = self.grad_norm / scale.squeeze()
        return (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)

    def _make_layout(self, group: dict[str, Any]) -> _Layout:
        """Arenas for the parameters that have state or a gradient; state that there is moves into them."""
        members: dict[bool, list[Tensor]] = {True: [], False: []}
        absent = []
        for p in group["params"]:
            old = self.state.get(p)
            if old:
                members[f"{self._moments[0].name}_scale" in old].append(p)
            elif p.grad is not None:
                members[_quantized(p, group)].append(p)
            else:
                absent.append(p)
        return _Layout([self._make_arena(params, kind) for kind, params in members.items() if params], absent)

    def _make_arena(self, params: list[Tensor], quantized: bool) -> _Arena:
        count, device = sum(blocks(p) for p in params), params[0].device
        step = torch.zeros(len(params), dtype=torch.float32, device=device)
        moments: list[Tensor | None] = []
        for _ in self._moments:
            dtype = torch.uint8 if quantized else torch.float32
            moments.append(torch.zeros(count * STATE_BLOCK, dtype=dtype, device=device))
            moments.append(torch.zeros(count, dtype=torch.float32, device=device) if quantized else None)
        block = 0
        for i, p in enumerate(params):
            views = {"step": step[i]}
            for moment, values, scales in zip(self._moments, moments[::2], moments[1::2], strict=True):
                assert values is not None
                begin = block * STATE_BLOCK
                views[moment.name] = values[begin : begin + p.numel()].view(p.shape)
                if scales is not None:
                    views[f"{moment.name}_scale"] = scales[block : block + blocks(p)]
            block += blocks(p)
            for name, old in self.state.get(p, {}).items():
                views[name].copy_(old)
            self.state[p] = views
        return _Arena(params, step, moments)

    def state_dict(self) -> dict[str, Any]:
        """The state as in ``torch.optim.Optimizer``, with the ``format_version`` of the entries."""
        return {**super().state_dict(), "format_version": FORMAT_VERSION}

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, bit for bit whatever the parameters' dtype; everything is copied.

        One without ``format_version`` may also be that of the optimizer of the same rule in ``torch.optim`` (moments of
        any floating dtype) or in bitsandbytes (8-bit in blocks of 256, or 32-bit). Moments are then taken into this
        optimizer's ``state``: 8-bit codes as they are where the map is the standard one, else quantised again. A second
        moment that bitsandbytes has rounded to zero, though the first is not zero, becomes the smallest code instead.
        Options that the other optimizer does not have keep this one's values.

        Raises:
            ValueError: what is loaded does not fit; nothing has changed then.
        """
        where = f"{self._name}: load_state_dict"
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"{where}: expected an optimizer's state dict, received no {key!r}")
        version = state_dict.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ValueError(f"{where}: expected format_version {FORMAT_VERSION}, received {version!r}")

        def keep(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            if "format_version" not in loaded:
                loaded = imported(self, self._moments, loaded, _quantized)
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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of a load, a copy or an unpickling, after checking it, and moves it into new arenas."""
        if "state" in state:
            for group in state["param_groups"]:
                for name, default in state.get("defaults", self.__dict__.get("defaults", {})).items():
                    group.setdefault(name, default)
                self._check_options(group)
            for param, entry in state["state"].items():
                for name, value in entry.items():
                    entry[name] = value.tensor if isinstance(value, _AsSaved) else value
                group = next((g for g in state["param_groups"] if any(p is param for p in g["params"])), None)
                if group is not None and entry:
                    self._check_entry(param, entry, group)
        super().__setstate__(state)
        self._layouts = {}
        for index, group in enumerate(self.param_groups):
            if any(self.state.get(p) for p in group["params"]):
                self._layouts[index] = self._make_layout(group)

    def _check_entry(self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]) -> None:
        quantized = _quantized(param, group)
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"step": (torch.float32, ())}
        for moment in self._moments:
            expected[moment.name] = (torch.uint8 if quantized else torch.float32, tuple(param.shape))
            if quantized:
                expected[f"{moment.name}_scale"] = (torch.float32, (blocks(param),))
        where, kind = f"{self._name}: load_state_dict", "8bit" if quantized else "fp32"
        if entry.keys() != expected.keys():
            raise ValueError(
                f'{where}: state="{kind}" expects the entries {sorted(expected)}, received {sorted(entry)}'
            )
        for name, (dtype, shape) in expected.items():
            value = entry[name]
            if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != torch.Size(shape):
                received = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{where}: {name}: expected {dtype} {shape}, received {received}")


def _number_on(device: torch.device, number: Tensor | None) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


def _quantized(param: Tensor, group: dict[str, Any]) -> bool:
    return group["state"] == "8bit" and param.numel() >= group["min_quantize_size"]
