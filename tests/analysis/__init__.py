"""Measurements of a model."""
