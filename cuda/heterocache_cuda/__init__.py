"""Move pages of KV state between a GPU and pinned host memory.

It needs torch and Triton. It imports no vLLM, and no GPU unless pages are moved on one.
"""
