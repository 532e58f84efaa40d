"""Learn which layers call vLLM's layer hooks: only these can be loaded while the forward runs.

Without the hook, a layer would read its pages before they are loaded. So a layer is reliable only
if it called its hook in every step in which the model's first layer did. Recurrent layers and
auxiliary caches never do, and vLLM leaves a drafter's layers out of a step near the end of a
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext


class LayerHooks:
    """The layers of one worker that reliably call their hooks, learned step by step."""

    def __init__(self) -> None:
        self._called: set[str] = set()
        """Layers that have called their hook in the present step."""
        self._reliable: set[str] = set()
        self._skipped: set[str] = set()
        self._first: str | None = None
        """The first layer that has ever called its hook: one of the model that a drafter serves."""
        self._is_expected = False
        self._is_known = False
        """True once a forward has shown which layers call their hooks, if any does."""

    def __contains__(self, layer: str) -> bool:
        return layer in self._reliable

    def expect(self) -> None:
        """Note that this step's forward calls the layer hooks of its model, if it has any."""
        self._is_expected = True

    def begin_step(self) -> bool:
        """Learn from the last step. Return whether other layers are reliable now.

        The first step that shows that no layer is counts, too.
        """
        before = self._reliable if self._is_known else None
        self._is_known |= self._is_expected
        self._is_expected = False
        called, self._called = self._called, set()
        if self._first in called:  # else a full graph, perhaps of the model without the drafter
            self._skipped |= self._reliable - called
            self._reliable = (self._reliable | called) - self._skipped
        return self._is_known and self._reliable != before

    def on_called(self, layer: str) -> None:
        self._first = self._first or layer
        self._called.add(layer)


def calls_layer_hooks(context: ForwardContext) -> bool:
    """True if the forward that is about to run in this context calls layer hooks.

    They are Python: a full CUDA graph skips them, and so does a forward without attention metadata.
    """
    graphs = getattr(context, "cudagraph_runtime_mode", None)
    return bool(context.attn_metadata) and getattr(graphs, "name", "") != "FULL"
