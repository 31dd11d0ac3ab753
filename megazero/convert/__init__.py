"""Reads and writes Hugging Face model folders, a bounded piece of a tensor at a time."""
