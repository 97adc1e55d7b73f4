"""LoRA, QLoRA and their relatives: adapters on the layers of a model, in PEFT's file format.

    shoestring.lora.apply(model, rank=16, alpha=32, target_modules="all-linear", quantize="nf4")
    ...
    shoestring.lora.save_adapter(model, "adapter")
"""

from shoestring.lora.apply import apply
from shoestring.lora.files import save_adapter
from shoestring.lora.groups import parameter_groups
from shoestring.lora.ia3 import IA3Linear
from shoestring.lora.initialize import initialize_eva
from shoestring.lora.linear import LoraLinear
from shoestring.lora.load import load_adapter
from shoestring.lora.merge import MergeReport, merge, unmerge
from shoestring.lora.options import IA3Options, LoraOptions, PrefixOptions, PromptOptions, VeraOptions
from shoestring.lora.switch import adapter_names, adapters_per_row, delete_adapter, disable_adapter, set_adapter
from shoestring.lora.vera import VeraLinear

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
    "merge",
    "parameter_groups",
    "save_adapter",
    "set_adapter",
    "unmerge",
]
