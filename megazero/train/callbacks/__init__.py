"""Callbacks watch a run: the trainer's own, and those that a user names with --callbacks (docs/develop)."""
