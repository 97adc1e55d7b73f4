"""Entry point of ``python -m shoestring.cli``, which runs the `shoestring` command."""

import sys

from shoestring.cli import main

if __name__ == "__main__":
    sys.exit(main())
