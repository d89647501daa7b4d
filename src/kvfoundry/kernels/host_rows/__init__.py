"""Chosen rows of every head out of host memory: for reads that are too scattered for a copy engine."""
