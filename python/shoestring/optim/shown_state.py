"""Find out which entries of ``optimizer.state`` the user has changed since a step has filled it."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

State = dict[Tensor, dict[str, Any]]


class ShownState:
    """The entries that the core of an optimizer has, as ``optimizer.state`` shows them.

    Users delete, replace or add entries, as ReLoRA does, or as Gaussian splatting does when it adds points.
    """

    def __init__(self) -> None:
        self.held: State = {}  # the core's entries of each parameter
        self._copies: list[Any] | None = []  # None after parameters have changed

    def note(self, state: State) -> None:
        """Note that ``state`` shows the entries of the core."""
        self._copies = [copy.copy(entries) for entries in state.values()]

    def is_shown(self, state: State) -> bool:
        """Return whether nothing has changed in ``state``. A step calls it, so it must be quick."""
        # Equality of lists and dicts stops at elements that are the same object. It raises an error for two
        # tensors of several elements, and each entry has such tensors.
        try:
            return list(state.values()) == self._copies
        except Exception:
            return False

    def is_held(self, state: State, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the core has the entries of ``state``. Entries that others have added do not count."""
        params = {p for group in groups for p in group["params"]}
        return self.held.keys() <= params and all(self.is_unchanged(p, state.get(p, {})) for p in params)

    def is_unchanged(self, param: Tensor, entries: dict[str, Any]) -> bool:
        held = self.held.get(param)
        if held is None:
            return not entries
        return all(entries.get(name) is value for name, value in held.items())

    def check_codes(self, name: str, param: Tensor, entries: dict[str, Any]) -> None:
        """Raise ValueError if the codes of a moment are new without their scales, or the scales without codes."""
        held = self.held.get(param, {})
        for scale in (key for key in held if key.endswith("_scale")):
            moment = scale.removesuffix("_scale")
            if (entries[moment] is held[moment]) != (entries[scale] is held[scale]):
                raise ValueError(
                    f"{name}: state: expected new values of {moment} and {scale} together, since {moment} has codes, "
                    "received one of them. To reset a parameter, delete its entry of state"
                )

    def follow(self, state: State, former: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Move entries from replaced parameters of a group to those in their places, as the core has done."""
        self._copies = None
        if len(former) != len(params):
            return
        pairs = [(old, new) for old, new in zip(former, params, strict=True) if old is not new]
        moved = [(old, new, self.held.pop(old)) for old, new in pairs if old in self.held]
        present = set(params)
        for old, new, held in moved:
            # The user's own entries count more. A parameter of another shape starts without state.
            unchanged = all(state.get(old, {}).get(name) is value for name, value in held.items())
            if old not in present and new not in state and unchanged and old.shape == new.shape:
                state[new] = state.pop(old)
            self.held[new] = held
