"""The base class of GaLore and APOLLO: low-rank steps of a base optimizer."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.core.one_thread import one_thread
from shoestring.optim.base import distinct
from shoestring.optim.parameter_names import by_names
from shoestring.optim.schedule_free_adamw import ScheduleFreeAdamW
from shoestring.optim.sgd import SGD
from shoestring.optim.state_dicts import FORMAT_VERSION, AsSaved
from shoestring.optim.steps import Steps
from shoestring.optim.virtual import LowRankMethod, VirtualParameters
from shoestring.optim.whole import expect_rows


class LowRankOptimizer(Steps):
    """The base class of the low-rank optimizers GaLore and APOLLO. Subclasses name the method.

    The C++ class ``LowRankCore`` projects a gradient to low rank, and an update back to full size. In
    between, a base optimizer such as AdamW steps a virtual parameter, a small stand-in for the matrix. Groups
    hold the options of the base optimizer, ``rank`` (None: no projection), ``update_proj_gap``, ``scale`` and
    the option ``_method.kind``. ``state[p]`` holds the base optimizer's state of the virtual parameter, the
    tensor ``_method.kept``, ``projection_age`` and ``seed``.
    """

    _method: ClassVar[LowRankMethod]

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
        self._virtual = VirtualParameters(self._method, self._name, base_optimizer, options)
        base = self._virtual.defaults
        for name in options:
            self._expect(
                name in base, name, f"an option of {base_optimizer.__name__}'s groups", options[name]
            )
        super().__init__(params, base | defaults)

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
        name, kinds = self._method.kind
        self._expect(f'"{group[name]}"' in kinds, name, kinds, group[name])

    @one_thread
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim.Optimizer``.

        Its options are checked before anything changes.
        """
        self._check_options({**self.defaults, **param_group})
        param_group["params"] = distinct(self._name, param_group["params"])
        super().add_param_group(param_group)
        try:
            self._add(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _add(self, group: dict[str, Any]) -> None:
        for i, p in enumerate(group["params"]):
            expect_rows(self._name, i, p)
        self._virtual.add(group)

    def _step(self) -> None:
        self.grad_norm = self._virtual.step(self.param_groups, self.state, self.max_grad_norm)

    @one_thread
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict as in ``torch.optim.Optimizer``.

        It also holds ``format_version`` and the name of the base optimizer.
        """
        saved = super().state_dict()
        base = {"name": self.base_optimizer.__name__, **self._virtual.beside()}
        state = self._virtual.with_base(saved["state"], self.param_groups, saved["param_groups"])
        return {**saved, "state": state, "format_version": FORMAT_VERSION, "base_optimizer": base}

    @_disable_dynamo
    @one_thread
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit.

        The state dict must come from the same class of optimizer with the same base optimizer. All tensors
        are copied. The state of a parameter with a name is found by the name.

        Raises:
            ValueError: the state dict does not fit. Nothing has changed then.
        """
        base: Any = state_dict.get("base_optimizer")
        expected = self.base_optimizer.__name__
        version = state_dict.get("format_version")
        if base is None and version is None:  # torch.distributed.checkpoint keeps only state and groups
            base, version = {"name": expected}, FORMAT_VERSION
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
            loaded = by_names(self, loaded)
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
        attributes = ("base_optimizer", "max_grad_norm", "_options")
        return {
            **super().__getstate__(),
            **{k: getattr(self, k) for k in attributes},
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
        is_option = "differentiable" in self.defaults
        super().__setstate__({"state": state["state"], "param_groups": state["param_groups"]})
        if not is_option:  # PyTorch adds it
            del self.defaults["differentiable"]
        self._virtual.show(self.state, self.param_groups)

    def _take(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        beside = self.__dict__.pop("_loaded_base")
        self._virtual = VirtualParameters(self._method, self._name, self.base_optimizer, self._options)
        for group in groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self._check_options(group)
            self._add(group)
        like = dict(pair for each in self._virtual.projected for pair in each)
        known = {p for group in groups for p in group["params"]}
        entries = {}
        for p, entry in state.items():
            for name, value in entry.items():
                entry[name] = value.tensor if isinstance(value, AsSaved) else value
            if p in known and entry:
                core_entries = self._core_entries(p, entry, like[p]) if p in like else {}
                entries[p] = {k: v for k, v in entry.items() if k not in core_entries}
                state[p] = core_entries
        self._virtual.load(entries, beside)

    def _core_entries(self, param: Tensor, entry: dict[str, Any], like: Tensor) -> dict[str, Any]:
        """Check the state entries that a step stores for a projected parameter, and return copies."""
        tensor: Any = entry.get(self._method.kept)
        good = isinstance(tensor, Tensor) and tensor.dtype == like.dtype and tensor.shape == like.shape
        received = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
        checks = [(self._method.kept, good, f"{like.dtype} {tuple(like.shape)}", received)]
        for name in ("projection_age", "seed"):
            value = entry.get(name)
            checks.append((name, isinstance(value, int), "a whole number", repr(value)))
        for name, good, expected, received in checks:
            if not good:
                raise ValueError(
                    f"{self._name}: load_state_dict: {name}: expected {expected}, received {received}"
                )
        entries = {name: entry[name] for name, *_ in checks}
        return {**entries, self._method.kept: tensor.to(param.device, copy=True)}


def _decay_is_a_penalty(base: type[Optimizer], group: dict[str, Any]) -> bool:
    """Return whether the base optimizer adds weight decay to the gradient.

    Such an L2 penalty does not work with projected gradients.
    """
    decoupled = (torch.optim.Adafactor, torch.optim.Muon)
    of_torch = base.__module__.startswith("torch.optim") and not issubclass(base, decoupled)
    return issubclass(base, SGD) or (of_torch and not group.get("decoupled_weight_decay", False))
