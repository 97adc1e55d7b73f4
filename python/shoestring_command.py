"""The entry point of the `shoestring` script.

``shoestring/__init__.py`` sees that this module is imported, and then imports PyTorch only when a command
needs it.
"""

import sys


def main() -> int:
    """Run the command line; return its exit code. Libraries that do not fit PyTorch are reported in one line."""
    from shoestring.cli import main as command_line

    try:
        return command_line()
    except ImportError as error:
        if not str(error).startswith("shoestring"):
            raise
        print(error, file=sys.stderr)
        return 1
