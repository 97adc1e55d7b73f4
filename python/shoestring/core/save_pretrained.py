"""Let the ``save_pretrained`` of other libraries' models write files from which the model can be loaded again.

A model whose layers this library has changed has another ``state_dict`` than its class. The class would write
it as it is, and ``from_pretrained`` would ignore the additional tensors.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

# Writes a model to a folder with the further arguments of save_pretrained, and returns True; or returns False
# for a model that its own class shall write.
Saver = Callable[[nn.Module, Path, Mapping[str, Any]], bool]

# The classes that define save_pretrained, by the module in which they are.
CLASSES = {
    "transformers.modeling_utils": "PreTrainedModel",
    "diffusers.models.modeling_utils": "ModelMixin",
    "huggingface_hub.hub_mixin": "ModelHubMixin",
}
_savers: list[Saver] = []


def register(saver: Saver) -> None:
    """Ask ``saver`` first whenever a model of one of ``CLASSES`` is saved."""
    _savers.append(saver)
    watch()


def watch() -> None:
    """Put the savers before ``save_pretrained`` of the libraries that are imported by now.

    Call this whenever a layer is changed, since a library may have been imported in the meantime.
    """
    for module, name in CLASSES.items():
        owner: Any = getattr(sys.modules.get(module), name, None)
        if owner is not None and not hasattr(owner.save_pretrained, "shoestring"):
            owner.save_pretrained = _asking(owner.save_pretrained)


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``save_pretrained`` that asks the savers before it calls ``original``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, save_directory, *args, **kwargs).arguments
        options = {key: value for key, value in list(bound.items())[2:] if key not in ("args", "kwargs")}
        options |= bound.get("kwargs", {})
        if isinstance(self, nn.Module) and any(s(self, Path(save_directory), options) for s in _savers):
            return None
        return original(self, save_directory, *args, **kwargs)

    save_pretrained.shoestring = True  # type: ignore[attr-defined]
    return save_pretrained
