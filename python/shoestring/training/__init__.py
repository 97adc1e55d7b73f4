"""Training code of the command line: configuration, models, training loop, checkpoints and reports."""
