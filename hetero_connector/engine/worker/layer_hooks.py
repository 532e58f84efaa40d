"""Learn which layers call vLLM's layer hooks: their loads may run while the forward does.

A layer that is not asked for in time would read its pages too early, or not at all. So only those
layers count that asked in every step in which any layer did: recurrent layers and auxiliary caches
never ask, and vLLM leaves a drafter's layers out of a step near the end of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext


class LayerHooks:
    """The layers of one worker that ask for their pages, learned step by step."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        """In the present step."""
        self._reliable: set[str] = set()
        self._skipped: set[str] = set()

    def __contains__(self, layer: str) -> bool:
        return layer in self._reliable

    def begin_step(self) -> None:
        """Learn from the last step."""
        asked = self._asked
        if not asked:
            return
        self._skipped |= self._reliable - asked
        self._reliable = (self._reliable | asked) - self._skipped
        self._asked = set()

    def on_asked(self, layer: str) -> None:
        """The forward asked for the layer."""
        self._asked.add(layer)


def called_in(context: ForwardContext) -> bool:
    """Return whether the forward about to run in this context calls layer hooks at all.

    They are Python: a full CUDA graph goes without them, and so does a forward without attention
    metadata.
    """
    graphs = getattr(context, "cudagraph_runtime_mode", None)
    return bool(context.attn_metadata) and getattr(graphs, "name", "") != "FULL"
