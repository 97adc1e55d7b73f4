"""Error messages for model directories with their own Python code (``auto_map``)."""

LONGEST = 400  # most characters of a reason, which may contain long values of the configuration


def why_not_loaded(error: Exception) -> str:
    """Describe in one line why transformers did not load something from a directory.

    With ``trust_remote_code=False`` transformers raises before it imports the directory's code, and asks
    nothing.
    """
    text = str(error).strip()
    if isinstance(error, ValueError) and "`trust_remote_code=True`" in text:
        return (
            "it needs the Python code that its auto_map names; read that code, then allow it with "
            "trust_remote_code=True, on the command line --trust-remote-code"
        )
    return f"{type(error).__name__}: {' '.join(text.split())}"[:LONGEST]
