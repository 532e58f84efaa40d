"""A prompt computed at one worker and answered by another: the bodies of both requests.

The prefill is the client's request with one token to answer. Its answer names the token at which
the other worker may resume; that worker reads the state by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_ANSWER_FIELDS = frozenset(
    {"best_of", "logprobs", "max_completion_tokens", "min_tokens", "n", "stream_options"}
    | {"top_logprobs", "use_beam_search"}
)
"""Fields that a prefill does not need, because its answer is not used."""
_ONE_TOKEN: Mapping[str, Mapping[str, Any]] = {
    "chat": {"max_tokens": 1},
    "completions": {"max_tokens": 1},
    "messages": {"max_tokens": 1},
    "responses": {"max_output_tokens": 1, "background": False, "store": False},
}
"""Fields of a request with one token to answer, by its door."""
_OF_STORED_STATE = ("ttl_s", "priority")
"""Fields in `heterocache` that are about the state that a request stores."""
_PREFILLER_HITS = "remote_prefill_cached_tokens"
"""Not passed on: vLLM would count the prefill worker's prefix hits as the other's."""


def can_hand_off(body: object) -> bool:
    """Return True if another worker may compute the prompt: only one, which is stored and read."""
    if not isinstance(body, Mapping):
        return False
    params = body.get("kv_transfer_params") or {}
    if not isinstance(params, Mapping):
        return False
    own = params.get("heterocache")
    is_stored = not (isinstance(own, Mapping) and own.get("no_store"))
    is_whole = params.keys().isdisjoint(
        {"do_remote_decode", "do_remote_prefill", "max_offload_tokens", "max_load_tokens"}
    )
    prompt = body.get("prompt")
    is_one = not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))
    # vLLM reads no cache for the log-probabilities of a prompt, which `echo` may ask for.
    is_read = body.get("prompt_logprobs") is None and not body.get("echo")
    return is_stored and is_whole and is_one and is_read


def prefill_body(door: str, body: Mapping[str, Any]) -> bytes:
    """Return the body for the worker that computes the prompt. `door`: its name."""
    given = body.get("kv_transfer_params") or {}
    own, tokens = given.get("heterocache"), given.get("prompt_token_ids")
    kept = {x: own[x] for x in _OF_STORED_STATE if x in own} if isinstance(own, Mapping) else {}
    params = {"do_remote_decode": True} | ({"heterocache": kept} if kept else {})
    params |= {} if tokens is None else {"prompt_token_ids": tokens}
    short = {name: value for name, value in body.items() if name not in _ANSWER_FIELDS}
    short |= {**_ONE_TOKEN[door], "stream": False, "kv_transfer_params": params}
    return msgspec.json.encode(short)


def decode_body(body: Mapping[str, Any], answer: bytes) -> bytes:
    """Return the body for the worker that decodes. `answer`: the prefill's.

    Raises ValueError for an answer that is no JSON object.
    """
    try:
        found = msgspec.json.decode(answer, type=_Answer).kv_transfer_params or {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the answer is not one of this API: {error}") from error
    handed = {name: value for name, value in found.items() if name != _PREFILLER_HITS}
    given = body.get("kv_transfer_params") or {}
    params = {**given, "do_remote_prefill": True, **handed}
    return msgspec.json.encode({**body, "kv_transfer_params": params})


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
