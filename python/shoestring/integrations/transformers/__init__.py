"""Make single Hugging Face transformers models use shoestring's operators; the change can be undone.

report = shoestring.patch(model)
model(input_ids=ids, labels=ids).loss.backward()  # computes no logits
report.undo()
"""

from shoestring.integrations.transformers.attention import register_attention
from shoestring.integrations.transformers.experts import register_experts
from shoestring.integrations.transformers.load import load_quantized
from shoestring.integrations.transformers.patch import PatchReport, patch
from shoestring.integrations.transformers.save import save_quantized

__all__ = [
    "PatchReport",
    "load_quantized",
    "patch",
    "register_attention",
    "register_experts",
    "save_quantized",
]
