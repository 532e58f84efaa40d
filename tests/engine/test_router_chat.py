"""The router renders conversations as vLLM's own renderer does."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.transformers_utils.chat_templates as bundled
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
)
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template

from examples.checkpoints.tokenizer import write_tokenizer
from hetero_connector.errors import IdentityError
from ownership.router.identity import (
    ChainCache,
    Doubt,
    ModelTokenizer,
    PromptIdentity,
    open_tokenizer,
)
from ownership.router.identity.chat import iterates_over_content

PLAIN = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{%- for m in messages %}<{{ m.role }}{{ m.name }}{{ m.tool_call_id }}>"
    "{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}[{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}]{% endfor %}</>{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}{{ thinking }}{{ enable_thinking }}"
    "{{ reasoning_effort }}{{ bos_token }}"
)
PARTS = (
    "{%- for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['type'] }}:{{ part['text'] }};{% endfor %}"
    "{% endif %}{%- for call in m.tool_calls or [] %}{{ call.function.arguments.items() | list }}"
    "{% endfor %}{% endfor %}"
)
MACRO = (
    "{% macro show(thing) %}{% for x in thing %}{{ x.text }}{% endfor %}{% endmacro %}"
    "{% set rest = messages[1:] %}{% for m in rest %}{{ show(m.content) }}{% endfor %}"
)
OTHER_MACRO = (
    "{% macro show(content) %}{% for x in content %}{{ x }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show('abc') }}{{ m.content }}{% endfor %}"
)
DEVELOPER = PLAIN + "{# 'developer' #}"
TEMPLATES = [PLAIN, PARTS, MACRO, OTHER_MACRO, DEVELOPER]
CONFIG: Any = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    trust_remote_code=False,
    allowed_local_media_path="",
    allowed_media_domains=None,
)

TOOL = {"type": "function", "function": {"parameters": {"type": "object", "b": 1}, "name": "f"}}
STRICT = {"type": "function", "function": {"name": "g", "strict": True, "description": "d"}}
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"z": 1, "a": "ä"}'}},
    {"id": "2", "type": "function", "function": {"name": "f", "arguments": "no JSON"}},
    {"id": "3", "type": "function", "function": {"name": "f", "arguments": "[1]"}},
]
TALK = [
    {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."},
    {"role": "user", "content": "Hi", "name": "ann"},
    {"role": "assistant", "content": "Well", "reasoning_content": "older name"},
    {"role": "assistant", "content": "So", "reasoning": "newer", "reasoning_content": "older"},
    {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "hm"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}] * 2},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "ok", "tool_calls": []},
    {"role": "user", "content": "end"},
]
BODIES: list[dict[str, Any]] = [
    {"messages": TALK},
    {"messages": TALK, "tools": [TOOL, STRICT]},
    {"messages": TALK[:2], "chat_template_kwargs": {"thinking": True, "unknown": 1}},
    {"messages": TALK[:2], "reasoning_effort": "high"},
    {"messages": TALK[:2], "reasoning_effort": "none"},
    {"messages": TALK[:2], "add_generation_prompt": False},
    {"messages": TALK[:6], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [{"role": "developer", "content": "d"}, *TALK[:2]]},
    {"messages": [TALK[1], {"role": "developer", "content": "d"}, TALK[0], TALK[6]]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


@cache
def vllm_tokenizer(folder: Path) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(folder))


@cache
def own_tokenizer(folder: Path) -> ModelTokenizer:
    return open_tokenizer(str(folder))


def vllm_text(folder: Path, template: str, request: Any, messages: Any, tools: Any) -> str:
    """Render as `HfRenderer.render_messages` does."""
    conversation, _, _ = parse_chat_messages(
        messages, CONFIG, _detect_content_format(template, default="string")
    )
    params = request.build_chat_params(template, "auto").with_defaults(
        {"tools": tools, "tokenize": False}
    )
    kwargs: Any = params.get_apply_chat_template_kwargs()
    kwargs.pop("return_dict")
    return str(safe_apply_chat_template(CONFIG, vllm_tokenizer(folder), conversation, **kwargs))


def own_text(folder: Path, template: str, path: str, body: dict[str, Any]) -> str | None:
    identity = PromptIdentity(own_tokenizer(folder), ChainCache(), chat_template=template)
    return identity.read(path, copy.deepcopy(body))[0].text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("body", BODIES)
def test_chat_requests(folder: Path, template: str, body: dict[str, Any]) -> None:
    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    try:
        expected = vllm_text(folder, template, request, request.messages, tools)
    except Exception:  # vLLM answers 400
        expected = None
    assert own_text(folder, template, "/v1/chat/completions", body) == expected
    assert expected is not None or template is MACRO or template is OTHER_MACRO


@pytest.mark.parametrize(
    "body",
    [
        {"system": "s", "messages": [{"role": "user", "content": "u"}]},
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: 1"},
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b"},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "d"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u"}] * 2},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "t"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"b": 1, "a": "ä"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "r"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "2",
                            "content": [{"type": "text", "text": "x"}] * 2,
                        },
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
        },
        {"messages": [{"role": "user", "content": "u"}], "output_config": {"effort": "low"}},
    ],
)
def test_messages_requests(folder: Path, body: dict[str, Any]) -> None:
    given = {"model": "m", "max_tokens": 5, **copy.deepcopy(body)}
    request = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(given)
    )
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    for template in (PLAIN, PARTS):
        expected = vllm_text(folder, template, request, request.messages, tools)
        assert own_text(folder, template, "/v1/messages", body) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hi", "instructions": "be brief"},
        {
            "input": [
                {"role": "user", "content": "u"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
                {"role": "assistant", "content": "said"},
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "reasoning": {"effort": "low"},
        },
    ],
)
def test_responses_requests(folder: Path, body: dict[str, Any]) -> None:
    request = ResponsesRequest.model_validate({"model": "m", **copy.deepcopy(body)})
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    for template in (PLAIN, PARTS):
        expected = vllm_text(folder, template, request, messages, tools)
        assert own_text(folder, template, "/v1/responses", body) == expected


def test_the_content_of_messages_has_the_form_that_vllm_gives_it() -> None:
    own = [path.read_text() for path in Path(bundled.__path__[0]).glob("*.jinja")]
    assert len(own) > 5
    found = set()
    for template in [*own, *TEMPLATES]:
        expected = _detect_content_format(template, default="string")
        assert iterates_over_content(template) == (expected == "openai"), template
        found.add(expected)
    assert found == {"openai", "string"}


def test_the_beginning_before_an_image_is_known(folder: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}
    text = "Look at this picture, please, "
    for template in (PLAIN, PARTS):
        messages = [
            {**TALK[1], "content": "Hi there"},
            {"role": "user", "content": [{"type": "text", "text": text}, image]},
        ]
        identity = PromptIdentity(own_tokenizer(folder), ChainCache(), chat_template=template)
        [prompt] = identity.read("/v1/chat/completions", {"messages": messages})
        assert prompt.doubts == (Doubt.MEDIA,)
        assert prompt.text is not None
        assert prompt.text.startswith("<userann>" if template is PLAIN else "<user>")
        assert ("picture" in prompt.text) == (template is PARTS), "placeholders stand before texts"


@pytest.mark.parametrize(
    ("path", "body", "doubt"),
    [
        ("/v1/chat/completions", {"messages": []}, Doubt.BODY),
        ("/v1/chat/completions", {"messages": [{}]}, Doubt.TEMPLATE),
        ("/v1/chat/completions", {"messages": TALK, "chat_template": "x"}, Doubt.TEMPLATE),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 5}, Doubt.TRUNCATION),
        ("/v1/completions", {"prompt_embeds": "a"}, Doubt.EMBEDS),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, Doubt.NOT_TRANSLATED),
        ("/v1/responses", {"input": "a", "previous_response_id": "b"}, Doubt.HISTORY),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, Doubt.NOT_TRANSLATED),
        ("/v1/messages", {"messages": [{"role": "user", "content": 5}]}, Doubt.NOT_TRANSLATED),
    ],
)
def test_what_is_not_read_as_vllm_does_is_doubted(
    folder: Path, path: str, body: dict[str, Any], doubt: Doubt
) -> None:
    identity = PromptIdentity(own_tokenizer(folder), ChainCache(), chat_template=PLAIN)
    [prompt] = identity.read(path, body)
    assert prompt.doubts == (doubt,)


def test_conversations_that_vllm_renders_in_code_are_doubted(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    identity = PromptIdentity(open_tokenizer(str(tmp_path)), ChainCache())
    [prompt] = identity.read("/v1/chat/completions", {"messages": TALK})
    assert (prompt.text, prompt.doubts) == (None, (Doubt.TEMPLATE,))
    [prompt] = identity.read("/v1/completions", {"prompt": "text"})
    assert (prompt.text, prompt.doubts) == ("text", ())


def test_a_tokenizer_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot find the files"):
        open_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(IdentityError, match="cannot be opened"):
        open_tokenizer(str(tmp_path))
