"""Measures a cluster for the planner, on the ranks at hand: collectives, rates, a model's modules."""
