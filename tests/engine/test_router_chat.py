"""The router renders conversations as vLLM's own renderer does."""

from __future__ import annotations

import asyncio
import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.transformers_utils.chat_templates as bundled
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
)
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template
from vllm.renderers.online_renderer import _reused_prompt_token_ids
from vllm.renderers.params import merge_kwargs

from examples.checkpoints.tokenizer import EOS_TOKEN_ID, write_tokenizer
from hetero_connector.errors import IdentityError
from ownership.router.identity import (
    ChainCache,
    ChainNaming,
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
    "{%- for call in m.tool_calls or [] %}[{{ call | tojson }}]{% endfor %}</>{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}{{ thinking }}{{ enable_thinking }}"
    "{{ reasoning_effort }}{{ bos_token }}"
)
PARTS = (
    "{%- for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['type'] }}:{{ part['text'] }}"
    "{{ part['name'] }}{{ part['extra'] }};{% endfor %}"
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
SYSTEM_FIRST = (
    "{%- for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{% endfor %}" + PLAIN
)
NO_NONE = "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
SAME = "{{ 'high' if reasoning_effort in ('none', 'high') else 'low' }}" + PARTS
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
    {"x": 1, "function": {"y": 2, "name": "f", "arguments": "{}"}, "type": "function", "id": "4"},
]
EMPTY = {"type": "text", "text": ""}
NOT_USED = {"tools": [TOOL], "tool_choice": "none"}
NOT_USED_FLAT = {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}
CHANGES = [{"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "f"}}]}]
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
EMPTY_TALK = [
    {"role": "system", "content": ""},
    {"role": "system", "content": [EMPTY, {"type": "text", "text": "Be brief.", "extra": "e"}]},
    {"role": "system", "content": "x-anthropic-billing-header: cch=1"},
    {"role": "user", "content": [EMPTY, "", {"type": "text", "text": "a"}, EMPTY]},
    {"role": "assistant", "content": ""},
    {"role": "tool", "content": [{"type": "text", "text": None}, {"type": "text", "text": "r"}]},
    {"role": "user", "content": [{"type": "tool_reference", "name": "f"}]},
    {"role": "user", "content": [{"type": "text", "text": "b", "extra": "f"}]},
]
BODIES: list[dict[str, Any]] = [
    {"messages": TALK},
    {"messages": TALK, "tools": [TOOL, STRICT]},
    {"messages": TALK[:2], "chat_template_kwargs": {"thinking": True, "unknown": 1}},
    {"messages": TALK[:2], "chat_template_kwargs": {"thinking": None, "reasoning_effort": "auto"}},
    {"messages": TALK[:2], "reasoning_effort": "high"},
    {"messages": TALK[:2], "reasoning_effort": "none"},
    {"messages": TALK[:2], "add_generation_prompt": False},
    {"messages": TALK[:6], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [{"role": "developer", "content": "d"}, *TALK[:2]]},
    {"messages": [TALK[1], {"role": "developer", "content": "d"}, TALK[0], TALK[6]]},
    {"messages": EMPTY_TALK},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def folder_with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a special token before each text."""
    made = tmp_path_factory.mktemp("with_bos")
    write_tokenizer(made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS_TOKEN_ID)]
    )
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@cache
def vllm_tokenizer(folder: Path) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(folder))


@cache
def own_tokenizer(folder: Path) -> ModelTokenizer:
    return open_tokenizer(str(folder))


def vllm_text(
    folder: Path,
    template: str,
    request: Any,
    messages: Any,
    tools: Any,
    defaults: dict[str, Any] | None = None,
) -> str:
    """Render as `HfRenderer.render_messages` does. `defaults`: the server's own."""
    conversation, _, _ = parse_chat_messages(
        messages, CONFIG, _detect_content_format(template, default="string")
    )
    params = request.build_chat_params(template, "auto").with_defaults(
        merge_kwargs(defaults, {"tools": tools, "tokenize": False})
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


IMAGE = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"messages": EMPTY_TALK},
        {"echo": True},
        {"messages": [{"role": "user", "content": [EMPTY, IMAGE]}]},
        {"messages": [{"role": "user", "content": [IMAGE | {"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
        {"kv_transfer_params": {}},
    ],
)
def test_token_ids_that_take_the_place_of_messages(folder: Path, change: dict[str, Any]) -> None:
    params = {"prompt_token_ids": [1, 2, 3]}
    body = {"messages": TALK, "kv_transfer_params": params, **change}
    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    renderer: Any = SimpleNamespace(validate_token_ids=lambda ids, parameter: None)
    expected = _reused_prompt_token_ids(request, renderer, request.messages)
    identity = PromptIdentity(own_tokenizer(folder), ChainCache(), chat_template=PLAIN)
    [prompt] = identity.read("/v1/chat/completions", body)
    assert (prompt.tokens, prompt.text is None) == (expected, expected is not None)


def test_values_that_a_client_leaves_open_are_the_server_s(folder: Path) -> None:
    defaults = {"thinking": "own", "enable_thinking": True}
    open_kwargs = {"thinking": None, "enable_thinking": "auto"}
    body = {"messages": TALK[1:2], "chat_template_kwargs": open_kwargs}
    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    expected = vllm_text(folder, PLAIN, request, request.messages, None, defaults)
    identity = PromptIdentity(
        own_tokenizer(folder), ChainCache(), chat_template=PLAIN, template_kwargs=defaults
    )
    [prompt] = identity.read("/v1/chat/completions", body)
    assert prompt.text == expected
    assert "ownTrue" in expected


@pytest.mark.parametrize(
    ("path", "body", "is_wrapped"),
    [
        ("/v1/completions", {"prompt": "Hi"}, True),
        ("/v1/completions", {"prompt": "Hi", "add_special_tokens": False}, False),
        ("/v1/chat/completions", {"messages": TALK[1:2]}, False),
        ("/v1/chat/completions", {"messages": TALK[1:2], "add_special_tokens": True}, True),
        ("/v1/messages", {"messages": TALK[1:2]}, False),
        ("/v1/responses", {"input": "Hi"}, True),
    ],
)
def test_special_tokens_are_where_vllm_puts_them(
    folder_with_bos: Path, path: str, body: dict[str, Any], is_wrapped: bool
) -> None:
    given = {"model": "m", **copy.deepcopy(body)}
    request: Any
    match path:
        case "/v1/completions":
            request = CompletionRequest.model_validate(given)
        case "/v1/responses":
            request = ResponsesRequest.model_validate(given)
        case "/v1/messages":
            request = AnthropicServingMessages.to_chat_completion_request(
                AnthropicMessagesRequest.model_validate({"max_tokens": 5, **given})
            )
        case _:
            request = ChatCompletionRequest.model_validate({"max_completion_tokens": 5, **given})
    params = request.build_tok_params(SimpleNamespace(max_model_len=1_000))
    identity = PromptIdentity(own_tokenizer(folder_with_bos), ChainCache(), chat_template=PLAIN)
    [prompt] = identity.read(path, body)
    tokenizer = vllm_tokenizer(folder_with_bos)
    tokens = tokenizer(prompt.text, **params.get_encode_kwargs())["input_ids"]
    assert (tokens[0] == EOS_TOKEN_ID) == is_wrapped
    naming = ChainNaming(bytes(16), 1)
    chain = identity.name(prompt, naming).chain
    assert chain is not None
    assert chain.keys == ChainCache().of_tokens(tokens, naming).keys


@pytest.mark.parametrize(
    "body",
    [
        {"system": "s", "messages": [{"role": "user", "content": "u"}]},
        {
            "tools": [
                {"name": "f", "input_schema": {"properties": {"a": {}}, "required": ["a"]}},
                {"name": "g", "input_schema": {}},
                {"name": "h", "input_schema": {"type": "other"}},
            ],
            "messages": [{"role": "user", "content": "u"}],
        },
        {"tools": [], "messages": [{"role": "user", "content": "u"}]},
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
        {"messages": [{"role": "user", "content": "u"}], "thinking": {"type": "disabled"}},
        {
            "system": "s",
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "system", "content": "a reminder"},
                {"role": "system", "content": "x-anthropic-billing-header: 1\nrest"},
                {"role": "system", "content": ""},
                {"role": "assistant", "content": "a"},
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": "x-anthropic-billing-header: 1"},
                        {"type": "text", "text": "another"},
                        {"type": "text", "text": " one"},
                    ],
                },
                {"role": "user", "content": "v"},
            ],
        },
        {
            "messages": [
                {"role": "system", "content": "s"},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": [
                                {"type": "tool_reference", "tool_name": "f"},
                                {"type": "text", "text": "r"},
                            ],
                        },
                        {"type": "tool_result", "tool_use_id": "2", "content": None},
                    ],
                },
            ],
        },
    ],
)
@pytest.mark.parametrize("template", [PLAIN, PARTS, SYSTEM_FIRST, NO_NONE, SAME])
def test_messages_requests(folder: Path, template: str, body: dict[str, Any]) -> None:
    assert own_text(folder, template, "/v1/messages", body) == messages_text(folder, template, body)


def messages_text(folder: Path, template: str, body: dict[str, Any]) -> str:
    given = {"model": "m", "max_tokens": 5, **copy.deepcopy(body)}
    request = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(given),
        merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(template),
        disabled_thinking_effort=disabled_effort(folder, template),
    )
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return vllm_text(folder, template, request, request.messages, tools)


def disabled_effort(folder: Path, template: str) -> Any:
    """Ask vLLM's own probe, which renders by `vllm_text`."""

    async def shown(effort: str) -> str | None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        request = ChatCompletionRequest.model_validate(body)
        try:
            return vllm_text(folder, template, request, request.messages, None)
        except Exception:  # as vLLM's probe does
            return None

    serving: Any = SimpleNamespace(_render_probe_prompt=shown)
    return asyncio.run(AnthropicServingMessages._probe_disabled_thinking_effort(serving))


def test_templates_have_different_habits(folder: Path) -> None:
    detect = AnthropicServingMessages._detect_merge_inline_system
    assert [detect(x) for x in (PLAIN, SYSTEM_FIRST)] == [False, True]
    efforts = [disabled_effort(folder, x) for x in (PLAIN, NO_NONE, SAME)]
    assert efforts == ["none", "low", "low"]


def test_the_beginning_before_an_image_of_a_tool_is_known(folder: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
    said = {"type": "text", "text": "This is the screen of today"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image, said]}
    messages = [
        {"role": "user", "content": "Look at the screen"},
        {"role": "user", "content": [result]},
    ]
    identity = PromptIdentity(own_tokenizer(folder), ChainCache(), chat_template=PLAIN)
    [prompt] = identity.read("/v1/messages", {"messages": messages})
    assert prompt.doubts == (Doubt.MEDIA,)
    assert prompt.text is not None
    assert prompt.text.startswith("<user>Look at the screen</><tool1>This is the")


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
                {"role": "system", "content": ""},
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": text} for text in ("", "x", "")],
                },
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
    text = "Look at this picture, please, "
    for template in (PLAIN, PARTS):
        messages = [
            {**TALK[1], "content": "Hi there"},
            {"role": "user", "content": [{"type": "text", "text": text}, IMAGE]},
        ]
        identity = PromptIdentity(own_tokenizer(folder), ChainCache(), chat_template=template)
        body = {"messages": messages, "add_special_tokens": True}
        [prompt] = identity.read("/v1/chat/completions", body)
        assert prompt.doubts == (Doubt.MEDIA,)
        assert prompt.is_wrapped, "the first token is a special one"
        assert prompt.text is not None
        assert prompt.text.startswith("<userann>" if template is PLAIN else "<user>")
        assert ("picture" in prompt.text) == (template is PARTS), "placeholders stand before texts"


@pytest.mark.parametrize(
    ("path", "body", "doubt"),
    [
        ("/v1/chat/completions", {"messages": []}, Doubt.BODY),
        ("/v1/chat/completions", {"messages": [{}]}, Doubt.TEMPLATE),
        ("/v1/chat/completions", {"messages": TALK, "chat_template": "x"}, Doubt.TEMPLATE),
        (
            "/v1/chat/completions",
            {"messages": TALK, "chat_template_kwargs": {"tools": [TOOL]}},
            Doubt.TEMPLATE,
        ),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 5}, Doubt.TRUNCATION),
        ("/v1/completions", {"prompt_embeds": "a"}, Doubt.EMBEDS),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, Doubt.NOT_TRANSLATED),
        ("/v1/responses", {"input": "a", "previous_response_id": "b"}, Doubt.HISTORY),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, Doubt.NOT_TRANSLATED),
        ("/v1/messages", {"messages": [{"role": "user", "content": 5}]}, Doubt.NOT_TRANSLATED),
        ("/v1/messages", {"messages": [{"role": "system", "content": 5}]}, Doubt.NOT_TRANSLATED),
        ("/v1/messages", {"messages": CHANGES}, Doubt.NOT_TRANSLATED),
        ("/v1/chat/completions", {"messages": TALK} | NOT_USED, Doubt.NOT_TRANSLATED),
        ("/v1/responses", {"input": "a"} | NOT_USED_FLAT, Doubt.NOT_TRANSLATED),
        (
            "/v1/messages",
            {
                "messages": TALK[1:2],
                "tools": [{"name": "f", "input_schema": {}}],
                "tool_choice": {"type": "none"},
            },
            Doubt.NOT_TRANSLATED,
        ),
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
