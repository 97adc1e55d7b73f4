"""``python -m shoestring.cli``: the command without the report of ``python -m shoestring``."""

import sys

from shoestring.cli import main

if __name__ == "__main__":
    sys.exit(main())
