"""Ranks, axes and process groups. Importing this package does not import torch; megazero.mesh.mesh has the groups."""
