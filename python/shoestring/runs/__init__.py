"""Training runs: saving and resuming them as a whole, and measuring what they use."""
