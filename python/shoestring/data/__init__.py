"""Text in, batches out: readers, tokenizers, the flat token file and the order in which batches are drawn."""
