"""Error texts for model directories that contain Python code (``auto_map``)."""

from shoestring.core.errors import printable

LONGEST = 400  # maximum characters of the description, which may contain long values of the configuration


def why_not_loaded(error: Exception) -> str:
    """Describe in one line why transformers failed to load a model, tokenizer or other file of a directory.

    If loading needs Python code of the directory and ``trust_remote_code`` is False, transformers raises
    before it imports the code.
    """
    text = str(error).strip()
    if isinstance(error, ValueError) and "`trust_remote_code=True`" in text:
        return (
            "it needs the Python code that its auto_map names; read that code, then allow it with "
            "trust_remote_code=True, on the command line --trust-remote-code"
        )
    return printable(f"{type(error).__name__}: {' '.join(text.split())}"[:LONGEST])
