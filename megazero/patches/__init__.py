"""What the patches of other trainers share: groups cut at the node boundary, hops, options, checks and reports.

``megatron_core_patch`` and ``fsdp2_patch`` carry the messages of a trainer that is not megazero's own over megazero's
hops and codecs. Here is what they have in common.
"""
