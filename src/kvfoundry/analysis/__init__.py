"""What a model does with its rows: which heads retrieve, where the attention goes, how large caches are.

`heads` measures head tables, which methods take as a parameter. `traces` follows the attention of single answers over
the passages of their `prompts`; `attention`, `coverage`, `sparsity` and `drift` are made of them. `passages`,
`cache_size` and `cache_bench` need none. `commands` is the command line. Empty, so that it starts without torch.
"""
