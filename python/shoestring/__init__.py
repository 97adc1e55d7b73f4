"""Train big models on a shoestring: training-efficiency operators for PyTorch, in C++ and CUDA."""

import sys
from typing import TYPE_CHECKING, Any


def _is_command_line() -> bool:
    """Whether this process is the command line, whose help and usage errors do without the seconds of PyTorch's import."""
    if "shoestring_command" in sys.modules:  # the entry of the installed script
        return True
    # argv[0] is "-m" while Python looks for the module of `python -m shoestring`.
    options = zip(sys.orig_argv, sys.orig_argv[1:])
    module = next((after for option, after in options if option[:1] == "-" and option[-1] == "m"), "")
    return sys.argv[:1] == ["-m"] and module in ("shoestring", "shoestring.cli")


if TYPE_CHECKING or not _is_command_line():
    from shoestring._public import *  # noqa: F403
    from shoestring._public import __all__, __version__  # noqa: F401
else:

    def __getattr__(name: str) -> Any:
        """Import PyTorch and register the operators where the command line first uses a public name."""
        public = "shoestring._public"
        # Submodules are looked up here before they are imported, also while the public names are being imported.
        if public not in sys.modules and (not name.startswith("_") or name in ("__all__", "__version__")):
            import importlib

            module = importlib.import_module(public)
            globals().update(
                {key: getattr(module, key) for key in ("__all__", "__version__", *module.__all__)}
            )
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'shoestring' has no attribute {name!r}")
