"""What the presets of `spec` compute: a `ModelSpec` knows what is kept, not what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ModelCompute(NamedTuple):
    """A model's work, in the few numbers that a step's duration needs."""

    parameters: float
    active_parameters: float
    """Used for each token."""
    weight_bytes: float
    """Of one parameter, as released."""
    pair_flops: float
    """Operations for each pair of a token and a token it attends to: per layer with full attention
    2 heads (key width + value width)."""

    def weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step of so many tokens reads, experts drawn independently."""
        idle: float = (1.0 - self.active_parameters / self.parameters) ** max(1.0, tokens)
        return self.weight_bytes * self.parameters * (1.0 - idle)


COMPUTE: Mapping[str, ModelCompute] = {
    # Released sizes (model cards); pairs by the configuration in `spec.presets`. Of DeepSeek-V4
    # the indexer scores every fourth token with 64 heads of 128, heavy compression attends to
    # every 128th with 64 (Pro: 128) heads of 512; what is selected does not grow with context.
    "deepseek-v4-flash": ModelCompute(284e9, 13e9, 0.56, 1.07e5),
    "deepseek-v4-pro": ModelCompute(1.6e12, 49e9, 0.54, 1.86e5),
    "gemma-3-27b": ModelCompute(27e9, 27e9, 2.0, 4.0 * 10 * 32 * 128),
    "gpt-oss-120b": ModelCompute(117e9, 5.1e9, 0.55, 4.0 * 18 * 64 * 64),
    "qwen3-coder-30b-a3b": ModelCompute(30.5e9, 3.3e9, 2.0, 4.0 * 48 * 32 * 128),
    "llama-3.1-8b": ModelCompute(8.0e9, 8.0e9, 2.0, 4.0 * 32 * 32 * 128),
    "llama-3.1-70b": ModelCompute(70.6e9, 70.6e9, 2.0, 4.0 * 80 * 64 * 128),
    "qwen3-next-80b-a3b": ModelCompute(80e9, 3e9, 2.0, 4.0 * 12 * 16 * 256),
    "deepseek-v3": ModelCompute(671e9, 37e9, 1.0, 2.0 * 61 * 128 * (192 + 128)),
}
"""By preset."""
