"""Renders conversations by the model's chat template, as vLLM does before it tokenises them.

The template runs in the sandbox of transformers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ownership.router.identity.bodies import TEXT_PARTS, Conversation
from ownership.router.identity.translations import BILLING

if TYPE_CHECKING:
    from jinja2 import nodes

_READ_FIELDS = frozenset(
    {"type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file"}
    | {"image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds"}
    | {"video_url", "video_embeds", "prompt_cache_breakpoint"}
)
"""Fields of a part that vLLM knows; templates get the others."""
_NOT_FOR_TEMPLATES = frozenset(
    {"conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "add_generation_prompt", "continue_final_message"}
)
"""Arguments of `apply_chat_template` itself."""
_MEDIA = f"\ue000{secrets.token_hex(8)}\ue001"
"""Stands for a media item in a rendered text: no client can write it."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    is_whole: bool
    """False if the text ends before the first media item."""
    unread: int = 0
    """Characters after that item."""


class TemplateError(Exception):
    """The template refuses the conversation, or fails."""


def render(conversation: Conversation, template: str, special_texts: Mapping[str, str]) -> Rendered:
    """Return the text of a conversation.

    `special_texts`: what templates know as `bos_token` and so on. Raises TemplateError.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        as_parts = iterates_over_content(template)
        messages = [_message(x, as_parts=as_parts) for x in conversation.messages]
        if any(x["role"] == "developer" for x in messages) and not _knows_developers(template):
            messages = _with_one_system_message([_without_developer(x) for x in messages])
        kwargs = dict(conversation.template_kwargs)
        own = {name: kwargs.pop(name, None) for name in _NOT_FOR_TEMPLATES}
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=None if conversation.tools is None else list(map(dict, conversation.tools)),
            documents=own["documents"],
            chat_template=template,
            add_generation_prompt=bool(own["add_generation_prompt"]),
            continue_final_message=bool(own["continue_final_message"]),
            **{**special_texts, **kwargs},
        )
    except Exception as error:  # a template runs code of its own, on what a client wrote
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    before, found, after = rendered[0][0].partition(_MEDIA)
    return Rendered(before, not found, len(after))


def takes_system_messages_anywhere(template: str) -> bool:
    """Return whether a template renders system messages that are not the first.

    vLLM tries it without special texts and without what transformers adds to a template's sandbox.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    talk = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        sandbox.from_string(template).render(messages=talk, add_generation_prompt=False)
    except Exception:  # a template runs code of its own
        return False
    return True


def _message(given: Mapping[str, Any], *, as_parts: bool) -> dict[str, Any]:
    """Return a message as templates expect it. Raises whatever a wrong message causes."""
    role, content = given["role"], given.get("content")
    parts = [content] if isinstance(content, str) else list(content or ())
    if role == "system":
        parts = [x for x in map(_without_billing, parts) if x is not None]
    made: dict[str, Any] = {"role": role}
    if as_parts:
        made["content"] = [x for x in map(_as_part, parts) if x is not None]
    else:
        texts = [x for x in map(_text, parts) if x]
        if _MEDIA in texts:  # placeholders stand before a message's texts
            texts.sort(key=_MEDIA.__ne__)
        made["content"] = "\n".join(texts)
    if role == "assistant":
        if given.get("tool_calls"):
            made["tool_calls"] = [_call(x) for x in given["tool_calls"]]
        reasoning = given.get("reasoning")
        if reasoning is None:
            reasoning = given.get("reasoning_content")  # its older name, which vLLM takes for it
        if reasoning is not None:
            made["reasoning"] = made["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in given:
            made["tool_call_id"] = given["tool_call_id"]
        if as_parts and all(x["type"] == "text" and x["text"] != _MEDIA for x in made["content"]):
            made["content"] = "\n".join(x["text"] for x in made["content"])
    for name in ("name", "task"):
        if isinstance(given.get(name), str):
            made[name] = given[name]
    if role == "developer":
        made["tools"] = given.get("tools")
    return made


def _text(part: Any) -> Any:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind in TEXT_PARTS and part.get("uuid") is None:
        return part.get(kind if kind in ("refusal", "thinking") else "text")
    return part.get("name") if kind == "tool_reference" else _MEDIA


def _as_part(part: Any) -> dict[str, Any] | None:
    """Return a part for templates that take parts; None for one that vLLM leaves out."""
    text = _text(part)
    if isinstance(part, str):
        return {"type": "text", "text": text}
    kind = part.get("type")
    if kind == "tool_reference":
        return {"type": kind, "name": text}
    if kind in ("text", "refusal") and text is None:
        return None
    others = {name: x for name, x in part.items() if name not in _READ_FIELDS}
    return {"type": "text", "text": text, **others}


def _without_billing(part: Any) -> Any:
    """Drop Claude Code's first line of the system prompt, which is another one each time.

    Returns None if nothing is left of the part.
    """
    is_text = isinstance(part, dict) and part.get("type") == "text"
    text = part.get("text") if is_text else part
    if not isinstance(text, str) or not text.startswith(BILLING):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if is_text and rest else rest or None


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object."""
    function = dict(given["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**given, "function": function}


def _knows_developers(template: str) -> bool:
    return '"developer"' in template or "'developer'" in template


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: x for name, x in message.items() if name != "tools"} | {"role": "system"}


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join all system messages at the beginning, unless there is one there alone."""
    system = [x for x in messages if x["role"] == "system"]
    if len(system) < 2 and (not system or messages[0] is system[0]):
        return messages
    texts = filter(None, map(_content_text, system))
    joined = {"role": "system", "content": "\n\n".join(texts)}
    return [joined, *(x for x in messages if x["role"] != "system")]


def _content_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@lru_cache(maxsize=32)
def iterates_over_content(template: str) -> bool:
    """Return whether a template takes a message's content as parts, not as text.

    As vLLM's `--chat-template-content-format auto` finds out: by a loop over the content.
    """
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)
    loops = list(tree.find_all(nodes.For))
    lists = set(_names_of(tree, "messages"))
    items = {
        x.target.name
        for x in loops
        if isinstance(x.target, nodes.Name) and any(_is_part_of(x.iter, name) for name in lists)
    }
    parameters: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        found = set(_content_parameters(tree, macro, items))
        parameters.update({id(loop): found for loop in macro.find_all(nodes.For)})
    for loop in loops:
        if any(_is_part_of(loop.iter, name, "content") for name in items):
            return True
        if isinstance(loop.iter, nodes.Name):
            names = parameters.get(id(loop), {"content"})
            if loop.iter.name in names:
                return True
    return False


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> Iterator[str]:
    """Yield the parameters of a macro that are a message's content in some call."""
    from jinja2 import nodes

    own = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        named = [(x.key, x.value) for x in call.kwargs if isinstance(x, nodes.Keyword)]
        for name, value in chain(zip(own, call.args, strict=False), named):
            if name in own and any(_is_part_of(value, item, "content") for item in items):
                yield name


def _names_of(tree: nodes.Template, name: str) -> Sequence[str]:
    """Return `name` and the variables that its value, or a part of it, is assigned to."""
    from jinja2 import nodes

    found = [name]
    for known in found:
        for assigned in tree.find_all(nodes.Assign):
            new = assigned.target.name if isinstance(assigned.target, nodes.Name) else name
            if new not in found and _is_part_of(assigned.node, known):
                found.append(new)
    return found


def _is_part_of(node: Any, name: str, key: str | None = None) -> bool:
    """Return whether an expression is a variable, or its entry `key`; filtered or sliced, too."""
    from jinja2 import nodes

    while isinstance(node, (nodes.Filter, nodes.Test)) or _is_slice(node):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return is_key and _is_part_of(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_part_of(node.node, name)


def _is_slice(node: Any) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
