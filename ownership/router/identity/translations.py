"""Translates requests of the Responses and Messages APIs to chat requests, as vLLM does.

Each returns None for a request with parts that are not translated here.

The fields of tool calls are in vLLM's order, because templates write them out. It is another one
for the Responses API: only the other two are read by vLLM's model of a chat request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

Body = Mapping[str, Any]
Message = dict[str, Any]

BILLING = "x-anthropic-billing-header"
"""The first line of Claude Code's system prompt, another one in each request; vLLM drops it."""
_IMAGE = {"type": "image_url", "image_url": {"url": ""}}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""The efforts of the Messages API."""
_TOOL_CHANGES = ("tool_addition", "tool_removal")


class MessagesHabits(NamedTuple):
    """The parts of translating Messages requests that vLLM decides by its chat templates."""

    merges_system: bool = False
    """True if system messages go to the beginning, because a template takes them only there."""
    disabled_effort: str = "none"
    """The effort that `thinking: {"type": "disabled"}` becomes."""


def from_chat(body: Body) -> Body:
    """Return a chat request with the tool calls in it as vLLM reads them."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return {**body, "messages": list(map(_with_calls_in_order, messages))}


def _with_calls_in_order(message: Any) -> Any:
    match message:
        case {"tool_calls": [*calls]}:
            return {**message, "tool_calls": list(map(_call_in_order, calls))}
    return message


def _call_in_order(call: Any) -> Any:
    match call:
        case {"id": _, "function": {"arguments": _, "name": _}, "type": _}:
            function = {**dict.fromkeys(("arguments", "name")), **call["function"]}
            return {**dict.fromkeys(("id", "function", "type")), **call, "function": function}
    return call


def from_responses(body: Body) -> Body | None:
    """Return the chat request of a Responses request without a stored history."""
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif not _add_items(messages, given):
        return None
    tools = body.get("tools") or []
    if not isinstance(tools, list) or any(
        not isinstance(x, Mapping) or x.get("type") != "function" for x in tools
    ):
        return None
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    return {
        "messages": messages,
        "tools": [{"type": "function", "function": tool} for tool in tools] or None,
        "tool_choice": body.get("tool_choice"),
        "reasoning_effort": effort,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "add_special_tokens": True,
        "truncate_prompt_tokens": body.get("truncation") if _truncates(body) else None,
    }


def _truncates(body: Body) -> bool:
    return body.get("truncation") not in (None, "disabled")


def _add_items(messages: list[Message], items: object) -> bool:
    """Add the items of an input; return False if one is not known, or is to be continued."""
    if not isinstance(items, list) or not all(_add_item(messages, item) for item in items):
        return False
    return not items or items[-1].get("status") not in ("in_progress", "incomplete")


def _add_item(messages: list[Message], item: object) -> bool:
    """Add an item of the input to the messages; return False for one that is not known here."""
    if not isinstance(item, dict):
        return False
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item:
        case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
            if item.get("namespace"):
                return False
            function = {"name": name, "arguments": arguments}
            call = {"id": call_id, "function": function, "type": "function"}
            if last is not None:
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call]})
        case {"type": "function_call_output", "call_id": call_id, "output": str(output)}:
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        case {"type": "reasoning", "content": [{"text": str(text)}, *_]}:
            if item.get("encrypted_content"):
                return False
            _add_to_assistant(messages, last, "reasoning", text)
        case {"role": "assistant", "content": str(text) | [{"text": str(text)}, *_]}:
            _add_to_assistant(messages, last, "content", text)
        case {"role": "user" | "system" | "developer", "content": _}:
            messages.append(item)
        case _:
            return False
    return True


def _add_to_assistant(messages: list[Message], last: Message | None, name: str, text: str) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def from_messages(body: Body, habits: MessagesHabits) -> Body | None:
    """Return the chat request of a Messages request."""
    given, tools, thinking = body.get("messages"), body.get("tools"), body.get("thinking")
    if not isinstance(given, list) or not _are_plain(tools):
        return None
    messages: list[Message] = []
    for message in given:
        if not isinstance(message, dict) or not _add_message(messages, message):
            return None
    system = [_system(body.get("system"))]
    if habits.merges_system:
        system += [message["content"] for message in messages if message["role"] == "system"]
        messages = [message for message in messages if message["role"] != "system"]
    if text := "".join(system):
        messages.insert(0, {"role": "system", "content": text})
    choice = body.get("tool_choice")
    config = body.get("output_config")
    effort = config.get("effort") if isinstance(config, Mapping) else None
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        effort = habits.disabled_effort
    return {
        "messages": messages,
        "tools": None if tools is None else [_tool(tool) for tool in tools],
        "tool_choice": choice.get("type") if isinstance(choice, Mapping) else None,
        "reasoning_effort": effort,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }


def _are_plain(tools: object) -> bool:
    if tools is None:
        return True
    return isinstance(tools, list) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("input_schema"), Mapping)
        for tool in tools
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    schema = tool["input_schema"]
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _system(given: object) -> str:
    if isinstance(given, str):
        return given
    blocks = given if isinstance(given, list) else []
    return "".join(text for block in blocks if not (text := _text(block)).startswith(BILLING))


def _text(block: object) -> str:
    is_text = isinstance(block, Mapping) and block.get("type") == "text"
    text = block.get("text") if is_text else None  # type: ignore[attr-defined]
    return text if isinstance(text, str) else ""


def _add_system(messages: list[Message], content: object) -> bool:
    """Add a system message that is not the first; return False if it changes the tools."""
    if isinstance(content, str):
        text = "" if content.startswith(BILLING) else content
    elif isinstance(content, list):
        if any(isinstance(x, Mapping) and x.get("type") in _TOOL_CHANGES for x in content):
            return False
        text = _system(content)
    else:
        return False
    messages += [{"role": "system", "content": text}] if text else []
    return True


def _add_message(messages: list[Message], message: Message) -> bool:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return _add_system(messages, content)
    if role not in ("user", "assistant"):
        return False
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return True
    if not isinstance(content, list):
        return False
    made: Message = {"role": role}
    parts: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                parts += [{"type": "text", "text": text}] if text else []
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "image", "source": _}:
                parts.append(_IMAGE)
            case {"type": "tool_use", "id": str(call_id), "name": str(name)}:
                function = {"arguments": json.dumps(block.get("input") or {}), "name": name}
                call = {"id": call_id, "function": function, "type": "function"}
                made.setdefault("tool_calls", []).append(call)
            case {"type": "tool_result"} if role == "user":
                if not _add_result(messages, block):
                    return False
            case _:
                return False
    if reasoning:
        made["reasoning"] = "".join(reasoning)
    if len(parts) == 1 and parts[0]["type"] == "text":
        made["content"] = parts[0]["text"]
    elif parts:
        made["content"] = parts
    if role != "user" or "content" in made:
        messages.append(made)
    return True


def _add_result(messages: list[Message], block: Mapping[str, Any]) -> bool:
    """Add a tool's result; return False if it has parts that are not known here.

    Its images follow in a message of the user's, and the tools it names in one of the tool's.
    """
    content = block.get("content") or ""
    texts, images, tools = [], 0, list[dict[str, str]]()
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for item in content if isinstance(content, list) else [None]:
        match item:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image", "source": {"url": str(_)} | {"data": str(_)}}:
                images += 1
            case {"type": "tool_reference", "tool_name": str(name)} if name:
                tools.append({"type": "tool_reference", "name": name})
            case _:
                return False
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    messages.append({**result, "content": "\n".join(texts)})
    if images:
        messages.append({"role": "user", "content": [_IMAGE] * images})
    if tools:
        messages.append({**result, "content": tools})
    return True
