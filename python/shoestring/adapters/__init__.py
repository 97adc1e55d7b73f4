"""Add LoRA and related adapters to layers, and save and load them. ``shoestring.lora`` exports the API."""
