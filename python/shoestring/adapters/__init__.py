"""LoRA and related adapters, on layers and in files. ``shoestring.lora`` exports the public names."""
