"""Let vLLM's Ray executor run on its CPU build, which has no name for a device in Ray.

Ray counts GPUs that do not exist; the workers compute on the CPU. Each of Ray's processes calls
`pretend_gpus` when it starts.
"""

from __future__ import annotations


def pretend_gpus() -> None:
    """Tell vLLM that its CPU platform is what Ray calls a GPU."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
