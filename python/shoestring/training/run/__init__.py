"""Run a training: the loop, its model, checkpoints, processes and signals."""
