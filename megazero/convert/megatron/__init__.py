"""Checkpoints of Megatron: megatron-core's torch_dist."""
