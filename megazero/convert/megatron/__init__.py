"""Checkpoints of Megatron: megatron-core's torch_dist, and the mp_rank folders of before."""
