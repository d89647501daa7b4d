"""Vectors as an index keeps them: rounded to bytes, and fewer of them."""
