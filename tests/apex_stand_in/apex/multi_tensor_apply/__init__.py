"""By this package NVIDIA's apex is told from PyPI's."""
