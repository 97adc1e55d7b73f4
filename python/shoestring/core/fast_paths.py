"""Turn off the fast paths of PyTorch's encoders, which read weights of layers without calling the layers."""

from torch import nn

# For each class, the attribute that allows the fast path, and the value that forbids it. Nothing else reads them.
SWITCHES = (
    (nn.TransformerEncoder, "use_nested_tensor", False),
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
)
# The attribute of an encoder with the value that set_fast_paths has replaced.
FORMER = "_shoestring_fast_path"


def set_fast_paths(model: nn.Module) -> None:
    """Turn off the fast path of each encoder that contains a layer whose forward must run; turn on the others.

    In evaluation, ``nn.TransformerEncoder`` and ``nn.TransformerEncoderLayer`` compute from the weights of
    their layers, and would leave out adapters and fake quantisation. The classes of such layers have the
    attribute ``_must_run``. Encoders whose fast path was off before keep it off.
    """
    for module in model.modules():
        for kind, switch, off in SWITCHES:
            if not isinstance(module, kind):
                continue
            must_run = any(getattr(type(part), "_must_run", False) for part in module.modules())
            if must_run and FORMER not in module.__dict__:
                module.__dict__[FORMER] = getattr(module, switch, off)
                setattr(module, switch, off)
            elif not must_run and FORMER in module.__dict__:
                setattr(module, switch, module.__dict__.pop(FORMER))
