"""The worth of an artifact: the seconds that a request saves by finding it.

Eviction by value, admission to SSD and prefetching ask this. An engine answers by what it has
learned of its own prefill; `default_seconds_saved` is for when nothing has been measured: only
its ratios mean anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_connector.spec.state_types import Family
from hetero_connector.store.catalog.nodes import Artifact

_SECONDS_PER_TOKEN = 1e-4
"""Prefill without attention over the context: a plausible scale, nothing depends on it."""
_ATTENTION_TOKENS = 32_768
"""Context at which attention costs a token as much as all else: 2 * parameters = 4 * layers *
width * context (FLOPs per token), for a dense model of 8e9 parameters, 32 layers, width 4096."""
_UNIT_TOKENS = 1024


def default_prefill_seconds(new_tokens: float, context_tokens: float) -> float:
    """Return the seconds for `new_tokens` over `context_tokens` before anything was measured."""
    attended = new_tokens * (context_tokens + new_tokens / 2) / _ATTENTION_TOKENS
    return _SECONDS_PER_TOKEN * (new_tokens + attended)


@dataclass(frozen=True)
class SecondsSaved:
    """The prefill of the tokens that would have to be computed again without an artifact.

    Prefix-proportional state: its own chunk. Boundary state: everything since the nearest
    boundary above that has the same state, for a request would have to resume there.
    """

    prefill_seconds: Callable[[float, float], float] = default_prefill_seconds
    """`prefill_seconds(new_tokens, context_tokens)`: what computing takes, as far as is known by
    now. Called often, on any thread that calls the store, with or without the store's lock."""

    def __call__(self, artifact: Artifact) -> float:
        """Return the seconds that a request saves if it can resume with the artifact."""
        start, end = artifact.node.chunk.start, artifact.node.chunk.end
        if artifact.state_type.family is Family.BOUNDARY:
            node = artifact.node.parent
            while node is not None and artifact.state_type not in node.artifacts:
                start, node = node.chunk.start, node.parent
        return self.prefill_seconds(end - start, start)

    def in_prefills(self, artifact: Artifact) -> float:
        """Return the same in prefills of 1,024 tokens.

        Unlike seconds it can be kept and compared later: when the engine turns out to be ten times
        as fast as was thought, or slows down for a while, all seconds change by the same factor.
        """
        return self(artifact) / self.prefill_seconds(_UNIT_TOKENS, 0)


default_seconds_saved = SecondsSaved()
"""The seconds saved as long as nothing has been measured."""
