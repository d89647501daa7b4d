"""Which row of a full head gives its slot to the next token: attention observed and scores ranked where they lie.

`naive` says what is computed; `fused` does it together with the step's attention in three Triton launches (extra
`kernels`), fit for a CUDA graph.
"""
