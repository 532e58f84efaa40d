"""Check the device path on one GPU: exactness, order and speed. See `docs/guides/gpu.md`.

It needs torch, Triton and this repository; no vLLM, no network. `--dry-run` needs no GPU: stand-ins
replace `torch.cuda`, and Triton's interpreter the kernels.
"""
