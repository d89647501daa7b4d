"""Attention of a prompt that also says how much attention every row received: in all, and from the last queries."""
