"""An agent's conversation as token ids: a long task, then replies and tool outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_WORDS = [
    "def",
    "return",
    "import",
    "class",
    "self",
    "error",
    "test",
    "file",
    "line",
    "open",
    "read",
    "write",
    "value",
    "index",
    "cache",
    "block",
    "token",
    "layer",
    "state",
    "window",
    "prefix",
    "store",
    "commit",
    "branch",
    "merge",
    "assert",
    "raise",
    "None",
    "True",
    "for",
    "while",
    "with",
    "lambda",
    "yield",
    "async",
    "await",
    "result",
    "request",
    "response",
    "server",
    "client",
    "retry",
]


class AgentSession:
    """The token log of one session. What was said never changes, so its state is reusable."""

    def __init__(self, tokenizer_file: Path, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._rng = random.Random(seed)
        self.tokens: list[int] = []

    def text(self, num_tokens: int) -> list[int]:
        """That many tokens of text that looks like source code; not added to the log."""
        lines = []
        for _ in range(num_tokens // 8 + 1):  # more than enough: a token is a byte
            lines.append(" ".join(self._rng.choices(_WORDS, k=self._rng.randint(3, 12))))
        encoded: list[int] = self._tokenizer.encode("\n".join(lines)).ids
        return encoded[:num_tokens]

    def task(self, num_tokens: int) -> None:
        """The first prompt: system prompt, tool descriptions, the repository, the task."""
        self.tokens += self.text(num_tokens)

    def reply(self, tokens: Sequence[int]) -> None:
        """What the model said."""
        self.tokens += tokens

    def tool_output(self, num_tokens: int) -> None:
        """What a tool returned."""
        self.tokens += self.text(num_tokens)
