"""Process-group manager. Importing this package does not import torch: ask megazero.mesh.mesh for groups."""
