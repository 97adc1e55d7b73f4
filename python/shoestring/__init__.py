"""Train big models on a shoestring: training-efficiency operators for PyTorch, in C++ and CUDA."""

import sys
from typing import TYPE_CHECKING, Any


def _is_command_line() -> bool:
    """Return whether this process is the command line of shoestring.

    The help texts and usage errors of the command line do not need PyTorch, whose import takes seconds.
    """
    if "shoestring_command" in sys.modules:  # the module with which the installed script `shoestring` starts
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
        """Import PyTorch and register the operators when the command line first uses a public name."""
        public = "shoestring._public"
        # Python calls this function for submodules too, before it imports them. That also happens during the
        # import of the public names, so the first condition prevents a second import.
        if public not in sys.modules and (not name.startswith("_") or name in ("__all__", "__version__")):
            import importlib

            module = importlib.import_module(public)
            globals().update(
                {key: getattr(module, key) for key in ("__all__", "__version__", *module.__all__)}
            )
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'shoestring' has no attribute {name!r}")
