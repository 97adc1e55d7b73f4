"""The error that a person can mend: one line, shown without a traceback, exit code 2."""

from __future__ import annotations

LONGEST = 1500  # characters of a message, which may quote a file


class InputError(ValueError):
    """Something given by the user cannot be used; the message is one line that says what, where and what to do."""

    def __init__(self, message: object) -> None:
        text = " ".join(str(message).split())
        super().__init__(text if len(text) <= LONGEST else text[:LONGEST] + "...")


def is_utf8(text: str) -> bool:
    """Whether a name or an argument is UTF-8; Python keeps other bytes as lone surrogates, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
