"""When running decodes need their next pages."""

from __future__ import annotations


class DecodePages:
    """Decodes by the step in which each begins a new page; all of them do so every `page_tokens`.

    Steps are counted from the engine's start. Any number of steps costs no more than one round.
    """

    def __init__(self, page_tokens: int) -> None:
        self._beginning = [0] * page_tokens
        """Decodes by the step, modulo a page's tokens, whose token begins a page."""
        self._decodes = 0

    def join(self, tokens: int, step: int) -> None:
        """A decode that holds `tokens` before that step."""
        self._beginning[self._place(tokens, step)] += 1
        self._decodes += 1

    def leave(self, tokens: int, step: int) -> None:
        """A decode that by then holds `tokens`."""
        self._beginning[self._place(tokens, step)] -= 1
        self._decodes -= 1

    def needed(self, step: int, steps: int) -> int:
        """New pages in so many steps from that one on."""
        ring = self._beginning
        if steps == 1:
            return ring[step % len(ring)]
        rounds, rest = divmod(steps, len(ring))
        first = step % len(ring)
        pages = rounds * self._decodes + sum(ring[first : first + rest])
        return pages + sum(ring[: max(0, first + rest - len(ring))])

    def fitting(self, step: int, steps: int, pages: int) -> int:
        """Of so many steps from that one on, those for which `pages` new pages suffice."""
        if self.needed(step, steps) <= pages:
            return steps
        ring, done = self._beginning, 0
        rounds = pages // self._decodes
        done, pages = rounds * len(ring), pages - rounds * self._decodes
        while (pages := pages - ring[(step + done) % len(ring)]) >= 0:
            done += 1
        return done

    def _place(self, tokens: int, step: int) -> int:
        return (step - tokens) % len(self._beginning)
