"""The base class of GaLore and APOLLO: low-rank steps of a base optimizer."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.optim.gradients import clip_coef, total_norm
from shoestring.optim.interrupts import Uninterrupted
from shoestring.optim.projections import is_left
from shoestring.optim.schedule_free_adamw import ScheduleFreeAdamW
from shoestring.optim.sgd import SGD
from shoestring.optim.state_dicts import FORMAT_VERSION, AsSaved
from shoestring.optim.virtual import DTYPES, VirtualParameters
from shoestring.optim.whole import expect_whole

# Dtype and shape of state entries, by name. None means that the entry is an int.
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]] | None]


class LowRankOptimizer(Optimizer):
    """The base class of the low-rank optimizers GaLore and APOLLO. Subclasses define the projection.

    A subclass projects a gradient to low rank, and an update back to full size. In between, a base optimizer
    such as AdamW steps a virtual parameter, a small stand-in for the matrix. Groups hold the options of the
    base optimizer, ``rank`` (None: no projection), ``update_proj_gap``, ``scale`` and options of the
    subclass. ``state[p]`` holds the base optimizer's state of the virtual parameter, and entries of the
    subclass.
    """

    _virtual_options: ClassVar[dict[str, Any]] = {"weight_decay": 0.0}

    max_grad_norm: float | None = None
    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer],
        defaults: dict[str, Any],
        options: dict[str, Any],
        max_grad_norm: float | None,
    ) -> None:
        kind, expected = (
            base_optimizer,
            "a class of optimizers that do not project, nor average weights, as AdamW",
        )
        is_class = isinstance(kind, type) and issubclass(kind, Optimizer)
        plain = is_class and not issubclass(kind, (LowRankOptimizer, ScheduleFreeAdamW))
        self._expect(plain, "base_optimizer", expected, kind)
        positive = max_grad_norm is None or max_grad_norm > 0
        self._expect(positive, "max_grad_norm", "None or a number above 0", max_grad_norm)
        self._expect(options.get("offload") is None, "offload", "None", options.get("offload"))
        self.base_optimizer, self.max_grad_norm, self._options = base_optimizer, max_grad_norm, options
        self._virtual = VirtualParameters(base_optimizer, options, self._virtual_options)
        base = self._virtual.defaults
        for name in options:
            self._expect(
                name in base, name, f"an option of {base_optimizer.__name__}'s groups", options[name]
            )
        super().__init__(params, base | defaults)

    def _down(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Project the gradient ``grad`` (m, n) to low rank, in fp32.

        If the projection in ``self.state[param]`` is missing or too old, compute a new one first.
        """
        raise NotImplementedError

    def _up(
        self, param: Tensor, low: Tensor, low_grad: Tensor, grad_factor: Tensor | float, group: dict[str, Any]
    ) -> None:
        """Apply weight decay and the low-rank update to a parameter.

        Args:
            param: the parameter, a matrix (m, n).
            low: the update by the base optimizer, (r, n) or (m, r).
            low_grad: the gradient that the base optimizer received, of the shape of ``low``: the projected
                gradient times ``grad_factor``.
            grad_factor: the factor that clips gradients.
            group: the parameter group, with its options.
        """
        raise NotImplementedError

    def _check_own(self, group: dict[str, Any]) -> None:
        """Raise ValueError if an option that only this subclass has is invalid."""

    def _own_shapes(self, param: Tensor, group: dict[str, Any]) -> Shapes:
        """Return dtype and shape of each state entry that the subclass adds, by name.

        None means that the entry is an int.
        """
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _expect(self, good: bool, name: str, expected: str, received: object) -> None:
        if not good:
            raise ValueError(f"{self._name}: {name}: expected {expected}, received {received!r}")

    def _check_options(self, group: dict[str, Any]) -> None:
        rank, gap, scale = (group[name] for name in ("rank", "update_proj_gap", "scale"))
        decay = group.get("weight_decay")
        natural = rank is None or (isinstance(rank, int) and rank >= 1)
        self._expect(natural, "rank", "None or a whole number of at least 1", rank)
        self._expect(
            isinstance(gap, int) and gap >= 1, "update_proj_gap", "a whole number of at least 1", gap
        )
        self._expect(scale > 0, "scale", "a number above 0", scale)
        seed, rounding = group["seed"], group.get("weight_rounding", "nearest")
        self._expect(isinstance(seed, int) and seed >= 0, "seed", "a whole number of at least 0", seed)
        self._expect(
            rank is None or rounding == "nearest", "weight_rounding", '"nearest", or rank=None', rounding
        )
        if rank is not None and decay and _decay_is_a_penalty(self.base_optimizer, group):
            expected = f"0 with {self.base_optimizer.__name__}, where it is an L2 penalty (or rank=None)"
            self._expect(False, "weight_decay", expected, decay)
        self._check_own(group)

    def _shape(self, param: Tensor, group: dict[str, Any]) -> tuple[int, int] | None:
        """Return the shape of the virtual parameter, (r, n) or (m, r), for a matrix (m, n).

        Return None if the parameter is stepped without a projection.
        """
        rank = group["rank"]
        if rank is None or param.dim() < 2 or param.numel() == 0:
            return None
        rows, columns = len(param), param.numel() // len(param)
        if rank > (rows if is_left(rows, columns, group) else columns):
            return None
        return (rank, columns) if is_left(rows, columns, group) else (rows, rank)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim.Optimizer``.

        Its options are checked before anything changes.
        """
        self._check_options({**self.defaults, **param_group})
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        seen: set[int] = set()
        for i, item in enumerate(param_group["params"]):
            key = id(item[1] if isinstance(item, tuple) else item)
            if key in seen:
                raise ValueError(
                    f"{self._name}: params[{i}]: expected each parameter once, received a duplicate"
                )
            seen.add(key)
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            self._virtual.add(group, self._shapes(group))
        except BaseException:
            self.param_groups.pop()
            raise

    def _shapes(self, group: dict[str, Any]) -> list[tuple[int, int] | None]:
        """Check the parameters of a group.

        Return the shape of each parameter's low-rank stand-in, the virtual parameter (None: no projection).
        """
        for i, p in enumerate(group["params"]):
            # Parameters without projection must be whole tensors too, since the norm for clipping covers all
            # gradients.
            expect_whole(self._name, i, p)
            if self._shape(p, group) is not None:
                self._expect(p.dtype in DTYPES, f"params[{i}]", "fp32, bf16 or fp16", p.dtype)
        return [self._shape(p, group) for p in group["params"]]

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Return the result of ``closure``, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with Uninterrupted():
            self._step_all()
        return loss

    def _step_all(self) -> None:
        factor = self._clip_coef()
        # `given` holds the original gradients that clipping replaces during the step.
        virtual, given = self._virtual, []
        virtual.update_options(self.param_groups)
        for group in self.param_groups:  # check all gradients before the step changes any projection
            for p in group["params"]:
                if p.grad is not None and p in virtual.of:
                    self._check_grad(p, group)
        try:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    if p in virtual.of:
                        low_grad = self._down(p, p.grad.flatten(1), group)
                        virtual.provide(p, low_grad if factor is None else low_grad.mul_(factor.to(p.device)))
                    elif factor is not None:
                        given.append((p, p.grad))
                        p.grad = p.grad * factor.to(p.device)
            virtual.base.step()
            for group in self.param_groups:
                for p in group["params"]:
                    low = virtual.of.get(p)
                    if low is not None and low.grad is not None:
                        on_device = 1.0 if factor is None else factor.to(p.device)
                        self._up(p, low.detach(), low.grad, on_device, group)
        finally:
            for p, grad in given:
                p.grad = grad
            virtual.release()
        virtual.show(self.state, self.param_groups)

    def _check_grad(self, param: Tensor, group: dict[str, Any]) -> None:
        same = self._shape(param, group) == self._virtual.of[param].shape
        self._expect(
            same, "rank", "the rank that the group was created with (and the same projection)", group["rank"]
        )
        assert param.grad is not None
        self._expect(not param.grad.is_sparse, "grad", "a dense gradient", "a sparse one")

    def _clip_coef(self) -> Tensor | None:
        self.grad_norm = None
        if self.max_grad_norm is None:
            return None
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return None
        self.grad_norm = total_norm(grads)
        return clip_coef(self.grad_norm, self.max_grad_norm)

    def _decay(self, weight: Tensor, param: Tensor, group: dict[str, Any]) -> None:
        if group.get("weight_decay"):
            weight.mul_(1.0 - self._lr(param, group) * group["weight_decay"])

    def _lr(self, param: Tensor, group: dict[str, Any]) -> Tensor | float:
        lr = group["lr"]
        return float(lr) if isinstance(lr, Tensor) and lr.device != param.device else lr

    def _position(self, param: Tensor) -> int:
        """Return the position of a parameter in the optimizer.

        Seeds depend on it, so parameters get distinct random numbers.
        """
        every = (p for group in self.param_groups for p in group["params"])
        return next(i for i, p in enumerate(every) if p is param)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict as in ``torch.optim.Optimizer``.

        It also holds ``format_version`` and the name of the base optimizer.
        """
        base = {"name": self.base_optimizer.__name__, **self._virtual.beside()}
        return {**super().state_dict(), "format_version": FORMAT_VERSION, "base_optimizer": base}

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit.

        The state dict must come from the same class of optimizer with the same base optimizer. All tensors
        are copied.

        Raises:
            ValueError: the state dict does not fit. Nothing has changed then.
        """
        base: Any = state_dict.get("base_optimizer")
        expected = self.base_optimizer.__name__
        version = state_dict.get("format_version")
        fits = isinstance(base, dict) and base.get("name") == expected and version == FORMAT_VERSION
        received = (
            f"{base['name']}, format_version {version}" if isinstance(base, dict) else "another optimizer's"
        )
        wanted = f"{self._name}'s over {expected}, format_version {FORMAT_VERSION}"
        if not fits:
            raise ValueError(
                f"{self._name}: load_state_dict: expected a state dict of {wanted}, received {received}"
            )

        def keep(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            entries = {
                key: {k: AsSaved(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
                for key, entry in loaded["state"].items()
            }
            return {**loaded, "state": entries}

        self._loaded_base = {k: v for k, v in base.items() if k != "name"}
        # This load_state_dict hook runs after the user's hooks.
        last = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            self.__dict__.pop("_loaded_base", None)

    def __getstate__(self) -> dict[str, Any]:
        own = ("base_optimizer", "max_grad_norm", "_options")
        return {
            **super().__getstate__(),
            **{k: getattr(self, k) for k in own},
            "_loaded_base": self._virtual.beside(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check the state from a load, a copy or an unpickling, and load it into a new base optimizer."""
        if "state" not in state:
            super().__setstate__(state)
            return
        before = dict(self.__dict__)
        try:
            self.__dict__.update({k: v for k, v in state.items() if k not in ("state", "param_groups")})
            self._take(state["state"], state["param_groups"])
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        super().__setstate__({"state": state["state"], "param_groups": state["param_groups"]})
        self._virtual.show(self.state, self.param_groups)

    def _take(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        beside = self.__dict__.pop("_loaded_base")
        self._virtual = VirtualParameters(self.base_optimizer, self._options, self._virtual_options)
        owner: dict[Tensor, dict[str, Any]] = {}
        for group in groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self._check_options(group)
            self._virtual.add(group, self._shapes(group))
            owner.update(dict.fromkeys(group["params"], group))
        entries = {}
        for p, entry in state.items():
            for name, value in entry.items():
                entry[name] = value.tensor if isinstance(value, AsSaved) else value
            if p in owner and entry:
                own = self._own_entries(p, entry, owner[p]) if p in self._virtual.of else {}
                entries[p] = {k: v for k, v in entry.items() if k not in own}
                state[p] = own
        self._virtual.load(entries, beside)

    def _own_entries(self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Check the state entries that the subclass added for a projected parameter, and return copies."""
        own = {}
        for name, kind in self._own_shapes(param, group).items():
            value: Any = entry.get(name)
            if kind is None:
                good, expected = isinstance(value, int), "a whole number"
            else:
                good = (
                    isinstance(value, Tensor)
                    and value.dtype == kind[0]
                    and value.shape == torch.Size(kind[1])
                )
                expected = f"{kind[0]} {kind[1]}"
            if not good:
                received = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"{self._name}: load_state_dict: {name}: expected {expected}, received {received}"
                )
            own[name] = value if kind is None else value.to(param.device, copy=True)
        return own


def _decay_is_a_penalty(base: type[Optimizer], group: dict[str, Any]) -> bool:
    """Return whether the base optimizer adds weight decay to the gradient.

    Such an L2 penalty does not work with projected gradients.
    """
    decoupled = (torch.optim.Adafactor, torch.optim.Muon)
    of_torch = base.__module__.startswith("torch.optim") and not issubclass(base, decoupled)
    return issubclass(base, SGD) or (of_torch and not group.get("decoupled_weight_decay", False))
