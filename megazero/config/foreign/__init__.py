"""Other programs' words: Megatron's flags, DeepSpeed's keys, and hints for typos. No torch."""
