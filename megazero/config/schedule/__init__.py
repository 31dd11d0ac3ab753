"""What follows from how far a run has come: batch sizes, as pure functions."""
