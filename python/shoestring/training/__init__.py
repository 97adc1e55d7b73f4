"""Training: configuration, models, the loop, checkpoints and reports, used by the command line."""
