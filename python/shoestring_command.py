"""The entry point of the `shoestring` script.

``shoestring/__init__.py`` sees that this module is imported, and then imports PyTorch only when a command
needs it.
"""


def main() -> int:
    """Run the command line; return its exit code."""
    from shoestring.cli import main as command_line

    return command_line()
