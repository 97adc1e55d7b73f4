"""The error that a person can mend: one line, shown without a traceback, exit code 2."""

from __future__ import annotations


class InputError(ValueError):
    """Something given by the user cannot be used; the message is one line that says what, where and what to do."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


def is_utf8(text: str) -> bool:
    """Whether a name or an argument is UTF-8; Python keeps other bytes as lone surrogates, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
