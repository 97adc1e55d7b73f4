"""PyTorch's backend ``simdev``: an asynchronous device that consists of threads.

With the folder that contains this package on ``PYTHONPATH``, ``import torch`` loads the backend through its entry
point in the group ``torch.backends``. Tensors then take ``device="simdev"``, and ``torch.simdev`` is the module
``simdev.device``. This file imports nothing, because it is imported while PyTorch is.
"""


def autoload() -> None:
    """Load the backend, if its library has been built. PyTorch calls this function."""
    import simdev.device

    simdev.device.load()
