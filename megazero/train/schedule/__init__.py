"""What changes as the training goes on: learning rate, loss scale, length of the run."""
