"""Training runs: saving and resuming them as a whole, finding their numbers, and measuring what they use."""
