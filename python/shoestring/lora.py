"""LoRA, QLoRA, DoRA, VeRA, IA3, prefix tuning and prompt tuning, with files in PEFT's format.

Add an adapter to a model, train the model, and save the adapter::

    shoestring.lora.apply(model, rank=16, alpha=32, target_modules="all-linear", quantize="nf4")
    ...
    shoestring.lora.save_adapter(model, "adapter")
"""

import shoestring.adapters.save_pretrained  # noqa: F401  # what save_pretrained of other libraries writes
from shoestring.adapters.apply import apply
from shoestring.adapters.files import save_adapter
from shoestring.adapters.groups import loraplus_param_groups
from shoestring.adapters.ia3 import IA3Linear
from shoestring.adapters.initialize import initialize_eva
from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.load import load_adapter
from shoestring.adapters.merge import MergeReport, merge, unmerge
from shoestring.adapters.options import IA3Options, LoraOptions, PrefixOptions, PromptOptions, VeraOptions
from shoestring.adapters.switch import (
    adapter_names,
    adapters_per_row,
    delete_adapter,
    disable_adapter,
    set_adapter,
)
from shoestring.adapters.vera import VeraLinear

__all__ = [
    "IA3Linear",
    "IA3Options",
    "LoraLinear",
    "LoraOptions",
    "MergeReport",
    "PrefixOptions",
    "PromptOptions",
    "VeraLinear",
    "VeraOptions",
    "adapter_names",
    "adapters_per_row",
    "apply",
    "delete_adapter",
    "disable_adapter",
    "initialize_eva",
    "load_adapter",
    "loraplus_param_groups",
    "merge",
    "save_adapter",
    "set_adapter",
    "unmerge",
]
