"""The words of other programs: Megatron's flags, DeepSpeed's keys, and what a misspelt name meant.

The words are data, in megatron.tsv and deepspeed.tsv, which are read when a name comes that is no option of megazero:
--help does not pay for them.
"""
