"""Mixtures of experts: the choice of experts for each token, and the order of tokens by expert."""
