"""``megazero verify``: proves a configuration on a small model and certifies it. Importing this needs no torch."""
