"""This package has Megatron's flags: one table of what each means here, and how a command line's are taken.

The table is read only when a name comes that is no option of megazero, so --help does not pay for it.
"""
