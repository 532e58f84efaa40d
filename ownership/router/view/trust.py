"""Remembers for each server whether its own answers agree with the router's."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from ownership.router.identity import Prompt, PromptChain
from ownership.router.view.certainty import Reason

_AGREEMENTS = 3
"""Agreements in a row after which a server is trusted again."""


class Kind(StrEnum):
    """The ways in which a prompt becomes tokens; each is checked by itself."""

    TEXT = "text"
    TOKENS = "tokens"
    """The ids are given: only their keys may differ."""
    CHAT = "chat"
    TOOLS = "tools"
    """A chat with tools: templates write them out in their own ways."""
    RESPONSES = "responses"
    MESSAGES = "messages"

    @classmethod
    def of(cls, path: str, prompt: Prompt) -> Kind:
        """Return the kind of a request by its path and its prompt."""
        if prompt.tokens is not None:
            return cls.TOKENS
        kind = _KINDS.get(path, cls.TEXT)
        has_tools = prompt.conversation is not None and prompt.conversation.has_tools
        return cls.TOOLS if kind is cls.CHAT and has_tools else kind


_KINDS = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/responses": Kind.RESPONSES,
    "/v1/messages": Kind.MESSAGES,
}


class Trust:
    """The results of comparisons, by server and kind."""

    def __init__(self) -> None:
        self._differs: dict[tuple[str, Kind], tuple[Reason, int]] = {}
        """The last difference, and the agreements since."""
        self._agreed: set[tuple[str, Kind]] = set()

    def compare_tokens(
        self, server: str, kind: Kind, ours: list[int], theirs: object
    ) -> Reason | None:
        """Compare a prompt's tokens with those of the server's `/tokenize`."""
        return self._note(server, kind, None if ours == theirs else Reason.TOKENS_DIFFER)

    def compare_report(
        self, server: str, kind: Kind, chain: PromptChain, report: Mapping[str, Any]
    ) -> Reason | None:
        """Compare a prompt's chain with the server's report of the request; return a difference.

        A report without a key, of a prompt shorter than a chunk, compares the number of tokens.
        """
        if report.get("prompt_tokens") != chain.num_tokens:
            return self._note(server, kind, Reason.TOKENS_DIFFER)
        match report.get("chain"):
            case [str(key), int(end)] if end in chain.ends:
                own = chain.keys[chain.ends.index(end)]
                return self._note(server, kind, None if own.hex() == key else Reason.KEYS_DIFFER)
            case None:
                return self._note(server, kind, None)
        return self._note(server, kind, Reason.KEYS_DIFFER)

    def reason(self, server: str, kind: Kind) -> Reason | None:
        """Return why the router's chains may not be the server's; None if they are."""
        differs = self._differs.get((server, kind))
        if differs is not None:
            return differs[0]
        return None if (server, kind) in self._agreed else Reason.UNCHECKED

    def forget(self, server: str) -> None:
        """Drop what is known of a server that has left, or has started again."""
        for kind in Kind:
            self._differs.pop((server, kind), None)
            self._agreed.discard((server, kind))

    def _note(self, server: str, kind: Kind, difference: Reason | None) -> Reason | None:
        key = server, kind
        if difference is not None:
            self._differs[key] = difference, 0
            return difference
        self._agreed.add(key)
        if key in self._differs:
            reason, agreements = self._differs[key]
            if agreements + 1 >= _AGREEMENTS:
                del self._differs[key]
            else:
                self._differs[key] = reason, agreements + 1
        return None
