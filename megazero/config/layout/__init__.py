"""Shard factors, wire formats, pipelines, batch sizes, and the rules between them. No torch."""
