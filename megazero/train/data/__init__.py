"""The run's data sets, their batches on the way to the device, and evaluation."""
