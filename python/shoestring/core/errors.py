"""InputError, for mistakes that a user can correct.

The command line prints its message in one line, without a traceback, and exits with code 2.
"""

from __future__ import annotations

LONGEST = 1500  # limit on the characters of a message, which may quote a file


class InputError(ValueError):
    """An argument or a file of the user cannot be used.

    The message is one line. It says what is wrong, where, and what to do.
    """

    def __init__(self, message: object) -> None:
        text = " ".join(str(message).split())
        super().__init__(text if len(text) <= LONGEST else text[:LONGEST] + "...")


def is_utf8(text: str) -> bool:
    """Return whether a name or an argument is valid UTF-8.

    Python keeps other bytes as lone surrogates, which cannot be written to a file.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
