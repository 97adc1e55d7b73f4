"""Language models in Hugging Face directories, quantised while they are loaded, and saved with their quantised weights."""

from shoestring.pretrained.load import load_quantized
from shoestring.pretrained.save import save_quantized

__all__ = ["load_quantized", "save_quantized"]
