"""Train big models on a shoestring: training-efficiency operators for PyTorch, in C++ and CUDA."""

import sys
from typing import TYPE_CHECKING, Any


def _is_command_line() -> bool:
    """Return whether this process runs the command ``shoestring`` or ``python -m shoestring``.

    If so, PyTorch is imported only when needed. Help texts and usage errors of the command do not need it,
    and the import takes seconds.
    """
    # The installed script `shoestring` starts by importing this module.
    if "shoestring_command" in sys.modules:
        return True
    # While Python looks for the module of `python -m shoestring`, sys.argv[0] is "-m".
    options = zip(sys.orig_argv, sys.orig_argv[1:])
    module = next((after for option, after in options if option[:1] == "-" and option[-1] == "m"), "")
    return sys.argv[:1] == ["-m"] and module in ("shoestring", "shoestring.cli")


if TYPE_CHECKING or not _is_command_line():
    from shoestring._public import *  # noqa: F403
    from shoestring._public import __all__, __version__  # noqa: F401
else:

    def __getattr__(name: str) -> Any:
        """Return a public name of this package; import PyTorch and register the operators on first use."""
        public = "shoestring._public"
        # Python calls a module's __getattr__ for submodules too, before it imports them. This also happens
        # while _public is being imported, so the first condition prevents a second import.
        if public not in sys.modules and (not name.startswith("_") or name in ("__all__", "__version__")):
            import importlib

            module = importlib.import_module(public)
            globals().update(
                {key: getattr(module, key) for key in ("__all__", "__version__", *module.__all__)}
            )
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'shoestring' has no attribute {name!r}")
