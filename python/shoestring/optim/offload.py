"""The option ``offload`` of the optimizers: where the optimizer state is stored."""

PLACES = "none | cpu | stream | nvme:DIR"  # values of the option offload, for the help text of commands

# Parameter bytes that ``offload="cpu"`` steps together while other parameters are copied.
BUCKET_BYTES = 8 << 20


def is_place(offload: object) -> bool:
    """Return whether ``offload`` is valid: None, "cpu", "stream" or "nvme:DIR"."""
    return offload in (None, "cpu", "stream") or (
        isinstance(offload, str) and offload[:5] == "nvme:" < offload
    )
