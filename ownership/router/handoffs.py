"""A prompt computed at one worker and answered by another: the bodies of both requests.

The prefill is the client's request with one token to answer. Its answer names the token at which
the other worker may resume; that worker reads the state by itself. The examples of proxies and of
Ray Serve hand off by the same rules.
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
_OF_STORED_STATE = ("no_store", "ttl_s", "priority")
"""Fields in `heterocache` that are about the state that a request stores."""
_OF_PROMPT = ("kv_load_tiers", "max_load_tokens", "max_offload_tokens", "prompt_token_ids")
"""Fields next to it that are about the prompt, and the state that is loaded and stored for it.

The router hands nothing off that has one of the first three (`can_hand_off`); Ray does."""
_PREFILLS_OWN = frozenset({"heterocache", "remote_prefill_cached_tokens"})
"""Not passed on: a prefill's report, and its prefix hits, which vLLM would count as the other's."""


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
        | {"kv_load_tiers"}
    )
    prompt = body.get("prompt")
    is_one = not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))
    # vLLM reads no cache for the log-probabilities of a prompt, which `echo` may ask for.
    is_read = body.get("prompt_logprobs") is None and not body.get("echo")
    return is_stored and is_whole and is_one and is_read


def prefill_parameters(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `kv_transfer_params` for the worker that computes the prompt. `given`: the client's.

    The session is the other worker's: its pin, its end and the report are not for this one.
    """
    given = given or {}
    own = given.get("heterocache")
    kept = {x: own[x] for x in _OF_STORED_STATE if x in own} if isinstance(own, Mapping) else {}
    params = {x: given[x] for x in _OF_PROMPT if given.get(x) is not None}
    return params | ({"heterocache": kept} if kept else {}) | {"do_remote_decode": True}


def decode_parameters(
    given: Mapping[str, Any] | None, answered: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return `kv_transfer_params` for the worker that decodes: the client's, and where to resume.

    `answered`: those of the prefill's answer.
    """
    handed = {x: value for x, value in (answered or {}).items() if x not in _PREFILLS_OWN}
    return {**(given or {}), "do_remote_prefill": True, **handed}


def prefill_body(door: str, body: Mapping[str, Any]) -> bytes:
    """Return the body for the worker that computes the prompt. `door`: its name."""
    params = prefill_parameters(body.get("kv_transfer_params"))
    short = {name: value for name, value in body.items() if name not in _ANSWER_FIELDS}
    short |= {**_ONE_TOKEN[door], "stream": False, "kv_transfer_params": params}
    return msgspec.json.encode(short)


def decode_body(body: Mapping[str, Any], answer: bytes) -> bytes:
    """Return the body for the worker that decodes. `answer`: the prefill's.

    Raises ValueError for an answer that is no JSON object.
    """
    try:
        answered = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the answer is not one of this API: {error}") from error
    params = decode_parameters(body.get("kv_transfer_params"), answered)
    return msgspec.json.encode({**body, "kv_transfer_params": params})


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
