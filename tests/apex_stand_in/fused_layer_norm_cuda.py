"""Apex's extension of norms: here it is only there."""
