"""Trains large language models on clusters whose nodes are joined by slow links."""

__version__ = "0.3.0"
