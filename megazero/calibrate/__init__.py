"""Measures a cluster for the planner, on the ranks at hand: collectives, codecs, a model's modules."""
