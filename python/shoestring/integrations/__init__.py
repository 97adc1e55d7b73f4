"""Other libraries, made to use shoestring."""
