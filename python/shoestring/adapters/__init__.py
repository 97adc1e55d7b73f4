"""LoRA and its relatives, on layers and in files; ``shoestring.lora`` has the public names."""
