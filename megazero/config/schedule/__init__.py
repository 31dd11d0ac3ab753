"""What follows from how far a run has come: batch sizes and sequence lengths, as pure functions."""
