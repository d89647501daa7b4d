"""One file per method: hand-computed small cases and the promises of its docstring."""
