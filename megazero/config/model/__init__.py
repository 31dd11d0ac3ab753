"""What the model is: its section and rules, parameters, FLOPs, and published folders. No torch."""
