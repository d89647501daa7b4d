"""Codecs: what is written, what is read, what it costs."""
