"""Data: sources of samples, Megatron-compatible files and their order, tokenizers. Only ``sampler`` imports torch."""
