"""The memory behind tensors, with the bytes that no tensor shows."""

from __future__ import annotations

import torch


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[bytes] uint8`: the whole allocation that the tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
