"""One new row of every head into preallocated buffers, at a slot that the device knows.

`naive` says what is done; `fused` does it in one Triton launch (extra `kernels`), fit for a CUDA graph.
"""
