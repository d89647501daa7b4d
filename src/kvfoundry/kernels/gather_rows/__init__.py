"""Compaction: the kept rows of every head moved to the front of other buffers, keys and values in one go."""
