"""Define InputError, which reports mistakes that a user can correct.

The command line prints the message of an InputError in one line, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1500  # maximum number of characters of an error message, which may quote a file


class InputError(ValueError):
    """Raised if an argument or a file of the user cannot be used.

    The message of the exception is one line. It says what is wrong, where, and what to do.
    """

    def __init__(self, message: object) -> None:
        text = " ".join(str(message).split())
        super().__init__(text if len(text) <= LONGEST else text[:LONGEST] + "...")


def is_utf8(text: str) -> bool:
    """Return whether a file name or a command-line argument is valid UTF-8.

    Python represents bytes that are not valid UTF-8 as lone surrogates, which cannot be written to a text
    file.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def argument_errors() -> Iterator[None]:
    """Raise ValueError, without the namespace of C++, if a C++ function refuses an argument."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not re.match(r"(shoestring::)?[\w:]+: [\w. ]+: expected .*, received", text):
            raise
        raise ValueError(re.sub(r"^shoestring::(\w+::)*", "", text)) from None
