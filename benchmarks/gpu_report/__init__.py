"""Pieces of the report on a GPU (__main__.py): each measures one thing and runs in a process of its own.

setting.py is what a piece is told, record.py what it hands back, pieces.py the list. Without a GPU every piece runs
as far as a CPU can, with tiny sizes: a rehearsal.
"""
