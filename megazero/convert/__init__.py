"""Folders as Hugging Face publishes models are read and written here, a bounded piece of a tensor at a time."""
