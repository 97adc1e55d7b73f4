"""The command line: the main job, training and fine-tuning. The modules are imported when a command needs them."""

import sys


def main(argv: list[str] | None = None) -> int:
    """The `shoestring` command; returns its exit code."""
    try:
        from shoestring.cli.app import main as run

        return run(argv)
    except ModuleNotFoundError as error:
        if (error.name or "shoestring").startswith("shoestring"):
            raise
        print(
            f"shoestring: error: the command needs the package {error.name}; install what it needs with "
            "`pip install --no-build-isolation '.[cli]'` in shoestring's source folder",
            file=sys.stderr,
        )
        return 2
