"""LoRA, QLoRA and their relatives: adapters on the layers of a model, in PEFT's file format.

    shoestring.lora.apply(model, rank=16, alpha=32, target_modules="all-linear", quantize="nf4")
    ...
    shoestring.lora.save_adapter(model, "adapter")
"""

from shoestring.lora.apply import apply
from shoestring.lora.files import save_adapter
from shoestring.lora.initialize import initialize_eva
from shoestring.lora.linear import LoraLinear
from shoestring.lora.load import load_adapter
from shoestring.lora.merge import MergeReport, merge, unmerge
from shoestring.lora.options import LoraOptions
from shoestring.lora.switch import adapter_names, adapters_per_row, delete_adapter, disable_adapter, set_adapter

__all__ = [
    "LoraLinear",
    "LoraOptions",
    "MergeReport",
    "adapter_names",
    "adapters_per_row",
    "apply",
    "delete_adapter",
    "disable_adapter",
    "initialize_eva",
    "load_adapter",
    "merge",
    "save_adapter",
    "set_adapter",
    "unmerge",
]
