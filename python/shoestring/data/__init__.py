"""Training data: text readers, tokenizers, the flat file of token ids, and the order of batches."""
