"""Compares the router's tokens and chains with the servers' own answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from ownership.router.identity import ModelTokenizer
from ownership.router.view.certainty import Reason
from ownership.router.view.prompts import PrefixViews, PromptView
from ownership.router.view.published import PublishedChain
from ownership.router.view.trust import Kind

Ask = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]
"""(method, path, body) -> the decoded answer of one server. Raises OSError, or ValueError for an
answer that is an error or no JSON."""

_TEXT = "Check: naïve café, 12345 文本\n\n  indented\tline <tag> …"
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
_CALL = {"name": "read_file", "arguments": '{"path": "a.txt"}'}
_TALK = [
    {"role": "system", "content": _TEXT},
    {"role": "user", "content": "Read a.txt"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "1\n2"},
    {"role": "user", "content": "Go on"},
]
PROBES: tuple[tuple[Kind, str, Mapping[str, Any]], ...] = (
    (Kind.TEXT, "/v1/completions", {"prompt": _TEXT}),
    (Kind.CHAT, "/v1/chat/completions", {"messages": _TALK[:2]}),
    (Kind.TOOLS, "/v1/chat/completions", {"messages": _TALK, "tools": [_TOOL]}),
)
"""Requests that `/tokenize` takes, too. A template that knows no tools refuses the last."""


def base_models(answer: object) -> frozenset[str]:
    """Return all names of the model without an adapter: adapters have a parent."""
    cards = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(cards, list) or not all(isinstance(x, Mapping) for x in cards):
        raise ValueError("the answer about models lists none")
    return frozenset(str(x.get("id")) for x in cards if x.get("parent") is None)


class Checks:
    """Checks servers at their start and by samples. Used on the event loop."""

    def __init__(self, views: PrefixViews) -> None:
        self._views = views

    async def refresh(self, server: str, ask: Ask, now_s: float) -> None:
        """Take what the server publishes about its chains. Raises as `ask` does."""
        answer = await ask("GET", "/v1/heterocache/chain", None)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("engines"), list):
            raise ValueError("the answer about chains names no engines")
        told = [x for x in answer["engines"] if not (isinstance(x, Mapping) and "error" in x)]
        engines = [PublishedChain.of(x) for x in told]
        if engines:
            names = base_models(await ask("GET", "/v1/models", None))
            engines = [replace(x, base_models=x.base_models | names) for x in engines]
        self._views.fleet.told(server, engines, now_s)

    async def probe(self, server: str, ask: Ask) -> list[Reason]:
        """Compare the tokens of `PROBES`; return the differences. Raises as `ask` does.

        Tell `Trust.forget` first if the server has started again.
        """
        tokenizer = self._views.identity.tokenizer
        if tokenizer is None:
            return []
        found = []
        for kind, path, body in PROBES:
            ours = self._tokens(tokenizer, path, body)
            try:
                answer = await ask("POST", "/tokenize", body)
            except ValueError:
                if ours is None or kind is not Kind.TEXT:
                    continue  # the template refuses it there, too, or there is none
                raise
            if not isinstance(answer, Mapping):
                raise ValueError("the answer of /tokenize names no tokens")
            difference = self._views.trust.compare_tokens(
                server, kind, ours or [], answer.get("tokens")
            )
            found += [difference] if difference is not None else []
        return found

    async def sample(
        self, server: str, ask: Ask, view: PromptView, answer_id: str
    ) -> Reason | None:
        """Compare a request's chain with the server's report of it, by the id of its answer.

        Returns the difference; None also if there is no report, or several prompts.
        """
        try:
            answer = await ask("GET", f"/v1/heterocache/requests/{answer_id}", None)
        except ValueError:
            return None  # it has left the newest 256, or no engine here has the connector
        reports = answer.get("reports", []) if isinstance(answer, Mapping) else None
        if not isinstance(reports, list) or not all(isinstance(x, Mapping) for x in reports):
            raise ValueError("the answer about a request lists no reports")
        engines = [x.published for x in self._views.fleet.engines() if x.server == server]
        roots = {(x.root, x.chunk_tokens) for x in engines}
        chains = [c for n, c in view.chains.items() if (n.root, n.chunk_tokens) in roots]
        if len(reports) != 1 or len(chains) != 1:
            return None
        return self._views.trust.compare_report(server, view.kind, chains[0], reports[0])

    def _tokens(
        self, tokenizer: ModelTokenizer, path: str, body: Mapping[str, Any]
    ) -> list[int] | None:
        """Return the router's tokens; None if its template refuses the conversation."""
        prompt = self._views.identity.read(path, body)[0]
        if prompt.text is None:
            return None
        tokens = tokenizer.tokens(prompt.text)
        return [*tokenizer.before, *tokens, *tokenizer.after] if prompt.is_wrapped else tokens
