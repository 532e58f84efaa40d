"""What an artifact is worth: the seconds a request saves by finding it.

Eviction by value and admission to SSD both ask this. An engine answers by what it has
learned of its own prefill (`recompute_seconds` of that); `default_seconds_saved` is for
when nothing has been measured: only its ratios mean anything.
"""

from __future__ import annotations

from collections.abc import Callable

from hetero_connector.artifacts.index import Artifact
from hetero_connector.spec.state_types import Family

SecondsSaved = Callable[[Artifact], float]
"""Seconds, at least 0, by which a request that resumes with the artifact is ahead of one that
cannot. Called often, on either of the store's threads, with the store's lock held."""

_SECONDS_PER_TOKEN = 1e-4
"""Of prefill without attention over the context: a plausible scale, nothing rests on it."""
_ATTENTION_TOKENS = 32_768
"""Context at which attention costs a token as much as all else: 2 * parameters = 4 * layers *
width * context (FLOPs per token), for a dense model of 8e9 parameters, 32 layers, width 4096."""


def default_prefill_seconds(new_tokens: float, context_tokens: float) -> float:
    """Of `new_tokens` over `context_tokens`, before anything has been measured."""
    attended = new_tokens * (context_tokens + new_tokens / 2) / _ATTENTION_TOKENS
    return _SECONDS_PER_TOKEN * (new_tokens + attended)


def recompute_seconds(
    prefill_seconds: Callable[[float, float], float] = default_prefill_seconds,
) -> SecondsSaved:
    """The prefill of the tokens that would have to be computed again without the artifact.

    Prefix-proportional state: its own chunk. Boundary state: everything since the nearest
    boundary above that has the same state, for a request would have to resume there.
    `prefill_seconds(new_tokens, context_tokens)`: what computing takes.
    """

    def saved(artifact: Artifact) -> float:
        start, end = artifact.node.chunk.start, artifact.node.chunk.end
        if artifact.state_type.family is Family.BOUNDARY:
            node = artifact.node.parent
            while node is not None and artifact.state_type not in node.artifacts:
                start, node = node.chunk.start, node.parent
        return prefill_seconds(end - start, start)

    return saved


default_seconds_saved = recompute_seconds()
"""When nothing has been measured."""
