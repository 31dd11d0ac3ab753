"""Predicts what a configuration costs, from sizes alone. No torch, no numpy."""
