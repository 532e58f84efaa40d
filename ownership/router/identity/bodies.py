"""Reads what a request's body says about its prompts.

Bodies come from clients: whatever is in them, they are read without an error. What the router does
not understand as vLLM does becomes a `Doubt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeGuard

from ownership.router.identity.translations import (
    MessagesHabits,
    from_chat,
    from_messages,
    from_responses,
)

Body = Mapping[str, Any]
CHARACTERS_PER_TOKEN = 4
"""A guess, for text that is not made into tokens."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""Types of a message's parts that are texts."""
_MEDIA_KEYS = frozenset(
    {"input_image", "image_url", "image_embeds", "image_pil", "input_audio", "audio_url"}
    | {"audio_embeds", "video_url", "video_embeds", "prompt_embeds"}
)
"""Keys with which a message's part is one of media, whatever its type."""
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Doubt(StrEnum):
    """Why a prompt's chain may not be the worker's."""

    BODY = "body"
    """The body is not one that vLLM takes."""
    NO_TOKENIZER = "no_tokenizer"
    """The model's tokenizer could not be opened here."""
    TEMPLATE = "template"
    """There is no chat template, it refuses the conversation, or the request has one of its own."""
    MEDIA = "media"
    """Nothing is known after the first image, audio or video."""
    EMBEDS = "embeds"
    """The prompt contains embeddings."""
    TRUNCATION = "truncation"
    """The worker cuts the prompt."""
    HISTORY = "history"
    """Earlier messages are stored at a worker."""
    NOT_TRANSLATED = "not_translated"
    """The conversation has parts that are not translated as vLLM does, or servers differ in it."""


@dataclass(frozen=True)
class Conversation:
    """A conversation to be rendered by the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The given ones that are set."""

    @property
    def has_tools(self) -> bool:
        """True if there are tools, or calls of tools, or their results."""
        used = (x.get("tool_calls") or x.get("role") == "tool" for x in self.messages)
        return bool(self.tools) or any(used)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request. Exactly one of `text`, `tokens` and `conversation` is given, or
    none with a doubt."""

    text: str | None = None
    tokens: Sequence[int] | None = None
    conversation: Conversation | None = None
    is_wrapped: bool = False
    """True if the tokenizer's special tokens stand around it."""
    unread: int = 0
    """Tokens after what is known of it: a guess."""
    others: int = 0
    """Tokens of the request's other prompts. A guess where they are text."""
    salt: str | None = None
    model: str | None = None
    """The model that the request names: the served one, or an adapter."""
    doubts: tuple[Doubt, ...] = ()


def read_prompts(path: str, body: object, habits: MessagesHabits) -> list[Prompt]:
    """Return the prompt of a request, by the path that it is sent to: of several the longest.

    Empty for a path without prompts.
    """
    if path not in _PATHS:
        return []
    if not isinstance(body, Mapping):
        return [Prompt(doubts=(Doubt.BODY,))]
    match path:
        case "/v1/completions":
            return _completion(body)
        case "/v1/responses":
            return _responses(body)
        case "/v1/messages":
            return _translated(body, from_messages(body, habits))
        case _:
            return _chat(from_chat(body))


def _completion(body: Body) -> list[Prompt]:
    given, doubts = body.get("prompt"), _doubts(body)
    if body.get("prompt_embeds") is not None:
        return [Prompt(**_common(body), doubts=(*doubts, Doubt.EMBEDS))]
    if body.get("suffix") is not None:
        return [Prompt(**_common(body), doubts=(*doubts, Doubt.NOT_TRANSLATED))]
    if isinstance(given, str) or _are_tokens(given):
        given = [given]
    if not isinstance(given, list) or not given:
        return [Prompt(**_common(body), doubts=(*doubts, Doubt.BODY))]
    longest = max(given, key=_length)
    others = sum(map(_guessed_tokens, given)) - _guessed_tokens(longest)
    return [replace(_completion_prompt(longest, body, doubts), others=others)]


def _length(given: object) -> int:
    return len(given) if isinstance(given, str | list) else 0


def _guessed_tokens(given: object) -> int:
    return _length(given) // (CHARACTERS_PER_TOKEN if isinstance(given, str) else 1)


def _completion_prompt(given: object, body: Body, doubts: tuple[Doubt, ...]) -> Prompt:
    is_wrapped = body.get("add_special_tokens", True) is not False
    if isinstance(given, str):
        return Prompt(text=given, is_wrapped=is_wrapped, **_common(body), doubts=doubts)
    if isinstance(given, list) and _are_tokens(given):
        return Prompt(tokens=given, **_common(body), doubts=doubts)
    return Prompt(**_common(body), doubts=(*doubts, Doubt.BODY))


def _are_tokens(given: object) -> bool:
    return isinstance(given, list) and bool(given) and type(given[0]) is int


def _chat(body: Body) -> list[Prompt]:
    messages = body.get("messages")
    if not _are_objects(messages):
        return [Prompt(**_common(body), doubts=(Doubt.BODY,))]
    tokens = _forwarded(body)
    if tokens is not None and not any(map(_has_media, messages)):
        return [Prompt(tokens=tokens, **_common(body))]
    doubts = _doubts(body)
    kwargs = body.get("chat_template_kwargs") or {}
    is_odd = not isinstance(kwargs, Mapping) or kwargs.get("tools") is not None
    if body.get("chat_template") is not None or is_odd:
        return [Prompt(**_common(body), doubts=(*doubts, Doubt.TEMPLATE))]
    effort = body.get("reasoning_effort")
    own = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in kwargs:
        own["enable_thinking"] = effort != "none"
    tools = body.get("tools")
    if tools is not None and tools != [] and not _are_objects(tools):
        return [Prompt(**_common(body), doubts=(*doubts, Doubt.BODY))]
    if tools and body.get("tool_choice") == "none":
        # --exclude-tools-when-tool-choice-none: servers do not tell if they were started with it.
        doubts = (*doubts, Doubt.NOT_TRANSLATED)
    conversation = Conversation(
        messages,
        None if tools is None else [_tool(x) for x in tools],
        _set({**kwargs, **_set(own)}),
    )
    is_wrapped = body.get("add_special_tokens") is True
    return [
        Prompt(conversation=conversation, is_wrapped=is_wrapped, **_common(body), doubts=doubts)
    ]


def _forwarded(body: Body) -> Any:
    """Return the token ids that vLLM takes in place of the messages, if these are texts."""
    params = body.get("kv_transfer_params")
    if not isinstance(params, Mapping) or body.get("echo"):
        return None
    return params.get("prompt_token_ids")


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(x, Mapping) and _is_media(x) for x in parts)


def _is_media(part: Mapping[str, Any]) -> bool:
    """Return True where vLLM's `has_non_text_content` does."""
    is_text = part.get("type", "text") in (*TEXT_PARTS, "tool_reference")
    return not is_text or not part.keys().isdisjoint(_MEDIA_KEYS)


def _set(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that vLLM takes as set: for others its server's defaults hold."""
    return {name: x for name, x in kwargs.items() if x is not None and x != "auto"}


def _responses(body: Body) -> list[Prompt]:
    if body.get("previous_response_id") is not None:
        return [Prompt(**_common(body), doubts=(Doubt.HISTORY,))]
    return _translated(body, from_responses(body))


def _translated(body: Body, chat: Body | None) -> list[Prompt]:
    if chat is None:
        return [Prompt(**_common(body), doubts=(Doubt.NOT_TRANSLATED,))]
    kept = {name: body.get(name) for name in ("model", "cache_salt", "kv_transfer_params")}
    return _chat({**chat, **kept})


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that vLLM gives it, in its order: templates write them out."""
    function = given.get("function")
    function = function if isinstance(function, Mapping) else {}
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = given.get("defer_loading")
    own = function.get("defer_loading")
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    if own is not None or deferred is not None:
        shown["defer_loading"] = deferred if own is None else own
    tool = {"type": "function", "function": shown}
    return tool if deferred is None else {**tool, "defer_loading": deferred}


def _are_objects(given: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(given, list) and bool(given) and all(isinstance(x, Mapping) for x in given)


def _doubts(body: Body) -> tuple[Doubt, ...]:
    return () if body.get("truncate_prompt_tokens") is None else (Doubt.TRUNCATION,)


def _common(body: Body) -> dict[str, Any]:
    salt, model = body.get("cache_salt"), body.get("model")
    return {
        "salt": salt if isinstance(salt, str) and salt else None,
        "model": model if isinstance(model, str) and model else None,
    }
