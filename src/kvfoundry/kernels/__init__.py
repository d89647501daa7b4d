"""One folder per operation: `naive.py` is the reference mathematics, its siblings do the same faster."""
