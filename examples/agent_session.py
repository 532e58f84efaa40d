"""An agent's conversation as token ids: a long task, then replies and tool outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_WORD_LIST = (
    "def return import class self error test file line open read write value index cache "
    "block token layer state window prefix store commit branch merge assert raise None True "
    "for while with lambda yield async await result request response server client retry"
)
_WORDS = _WORD_LIST.split()


class AgentSession:
    """The token log of one session. It only grows, so state of its prefixes can be reused."""

    def __init__(self, tokenizer_file: Path, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._rng = random.Random(seed)
        self.tokens: list[int] = []

    def draw_text(self, num_tokens: int) -> list[int]:
        """Return random text that looks like source code, without adding it to the log."""
        lines = []
        for _ in range(num_tokens // 8 + 1):  # more than enough: a token is a byte
            lines.append(" ".join(self._rng.choices(_WORDS, k=self._rng.randint(3, 12))))
        encoded: list[int] = self._tokenizer.encode("\n".join(lines)).ids
        return encoded[:num_tokens]

    def add_text(self, num_tokens: int) -> None:
        """Add a task or a tool's output of so many tokens."""
        self.tokens += self.draw_text(num_tokens)

    def add_reply(self, tokens: Sequence[int]) -> None:
        """Add the model's reply."""
        self.tokens += tokens
