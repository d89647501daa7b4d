"""Attention of the newest queries over rows in preallocated buffers: lengths on the device, no decision on the host.

`naive` says what is computed; `fused` does it in Triton (extra `kernels`), split over rows, and can be captured in a
CUDA graph.
"""
