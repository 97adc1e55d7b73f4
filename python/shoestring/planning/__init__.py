"""Plan a training run: measure the machine, and compute the time of models on hardware that is not here."""
