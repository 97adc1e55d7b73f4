"""Data for training: text readers, tokenizers, the flat token file, and the order of batches."""
