"""The command line: the main job, training and fine-tuning. The modules are imported when a command needs them."""

import sys
from importlib.util import find_spec

PACKAGES = ("typer", "rich", "numpy", "transformers", "tokenizers", "matplotlib")  # of the extra [cli]


def main(argv: list[str] | None = None) -> int:
    """The `shoestring` command; returns its exit code."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(
            f"shoestring: error: the command needs {', '.join(missing)}; install what it needs with "
            "`pip install --no-build-isolation '.[cli]'` in shoestring's source folder",
            file=sys.stderr,
        )
        return 2
    from shoestring.cli.app import main as run

    return run(argv)
