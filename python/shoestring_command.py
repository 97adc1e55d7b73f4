"""The entry of the `shoestring` script: while it is imported, `import shoestring` leaves PyTorch out until it is needed."""


def main() -> int:
    """Run the command line; return its exit code."""
    from shoestring.cli import main as command_line

    return command_line()
