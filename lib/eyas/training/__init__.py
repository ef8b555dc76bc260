"""Train a drafter: trainer, training-time test, losses, workers, several processes."""
