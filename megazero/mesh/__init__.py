"""This package manages process groups. Importing it does not import torch; megazero.mesh.mesh has the groups."""
