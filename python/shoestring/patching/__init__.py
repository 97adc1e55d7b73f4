"""Models of others, made to use shoestring: one instance at a time, and reversibly.

    report = shoestring.patch(model)
    model(input_ids=ids, labels=ids).loss.backward()  # no logits
    report.undo()
"""

from shoestring.patching.attention import register_attention
from shoestring.patching.patch import PatchReport, patch

__all__ = ["PatchReport", "patch", "register_attention"]
