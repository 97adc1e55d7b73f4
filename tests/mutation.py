"""A change of one place of a source file, which the tests must notice."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A change of `old` to `new` in a file."""

    what: str
    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """Return the text of the file with the change; end the script if the place is not there exactly once."""
        if text.count(self.old) != 1:
            sys.exit(f"{self.file}: expected {self.old!r} once, received it {text.count(self.old)} times")
        return text.replace(self.old, self.new)
