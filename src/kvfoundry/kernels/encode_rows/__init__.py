"""Quantize rows in groups and pack their codes, straight into preallocated buffers of codes."""
