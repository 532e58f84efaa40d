"""A Triton backend that is found by its name, `cpu`, and never asked for anything.

vLLM's CPU build takes Triton for usable where a backend of that name exists. Kernels then run in
Triton's interpreter, which compiles nothing.
"""
