"""RULER's thirteen synthetic tasks: facts, chains, counts and documents in as much filler as a length holds.

Source of the form: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024,
arXiv:2404.06654. The wording, the words and the haystack are our own.
"""
