"""LoRA and QLoRA: adapters on the linear layers of a model, in PEFT's file format.

    shoestring.lora.apply(model, rank=16, alpha=32, target_modules="all-linear", quantize="nf4")
    ...
    shoestring.lora.save_adapter(model, "adapter")
"""

from shoestring.lora.adapter_files import load_adapter, save_adapter
from shoestring.lora.convert import apply, merge, unmerge
from shoestring.lora.layer import LoraLinear

__all__ = ["LoraLinear", "apply", "load_adapter", "merge", "save_adapter", "unmerge"]
