"""The scores of published benchmarks: pure functions of strings, one file per kind, anchored to recorded numbers."""
