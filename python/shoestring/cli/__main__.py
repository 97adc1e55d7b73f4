"""`python -m shoestring.cli` is the `shoestring` command."""

import sys

from shoestring.cli.app import main

sys.exit(main())
