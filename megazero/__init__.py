"""Trains large language models on clusters whose nodes are joined by slow links."""
