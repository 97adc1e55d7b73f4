"""Names of the device's modes, which tests have as parameters."""

from simdev.device import Mode


def mode_of(name: str) -> Mode:
    """Return the mode of a name: "lazy", "eager", or "delay" with a seed."""
    if name.startswith("delay"):
        return Mode(delay_us=300, seed=int(name.removeprefix("delay")))
    return Mode(lazy=name == "lazy")
