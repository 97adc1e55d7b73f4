"""The `shoestring` command line. Each command imports its modules only when it runs."""

import sys
from importlib.util import find_spec

# packages that the pip extra shoestring[cli] installs
PACKAGES = ("typer", "rich", "numpy", "transformers", "tokenizers", "jinja2", "matplotlib")


def main(argv: list[str] | None = None) -> int:
    """Run the `shoestring` command; return its exit code."""
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
