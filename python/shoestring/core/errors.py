"""Define InputError, which reports mistakes that a user can correct.

The command line prints the message of an InputError in one line, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import re

LONGEST = 1500  # maximum number of characters of an error message, which may quote a file
# Characters that a terminal acts on or does not show: control characters, marks of direction, separators of lines,
# invisible characters and halves of characters. csrc/files/quote.cpp has the same.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Escape the characters of a text, such as a file's name, that a terminal acts on or does not show.

    Ends of lines and tabs stay.

    Example:
        >>> printable("a\x1b[2Jb\u202ec")
        'a\\x1b[2Jb\\u202ec'
    """

    def escape(match: re.Match[str]) -> str:
        return match[0] if match[0] in "\n\t" else match[0].encode("unicode_escape").decode()

    return HIDDEN.sub(escape, text)


class InputError(ValueError):
    """Raised if an argument or a file of the user cannot be used.

    The message of the exception is one line without characters that a terminal acts on. It says what is wrong,
    where, and what to do.
    """

    def __init__(self, message: object) -> None:
        text = printable(" ".join(str(message).split()))
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
