"""Prompt attention that leaves most of its work out: which blocks and rows every head reads, and how that was chosen.

After MInference (arXiv 2407.02490). A pattern (`a_shape`, `vertical_slash`, `block_sparse`) makes an index from queries
and keys; `prefill` picks the pattern of every head and attends; `search` finds the patterns of a model, `table` keeps
them.
"""
