"""This measures a cluster for the planner: collectives, codecs, a model's modules, on the ranks at hand."""
