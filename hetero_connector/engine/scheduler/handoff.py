"""The request parameters of a handoff: one engine computes a prompt, another decodes it.

vLLM's proxies send the prompt to a prefiller with `kv_transfer_params["do_remote_decode"]`. They
forward the `kv_transfer_params` of its answer to the decoder, with the same prompt. The answer says
only how much of the prompt is stored: the decoder finds that by the prompt's chain, and waits for
no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

TO_DECODE = "do_remote_decode"
PREFILLED = "do_remote_prefill"
PREFILLED_TOKENS = "prefilled_tokens"
FIELDS = frozenset({TO_DECODE, PREFILLED, PREFILLED_TOKENS})


def is_prefill(request: Request) -> bool:
    """Return True if another engine will decode this request."""
    return bool(_params(request).get(TO_DECODE))


def was_prefilled(request: Request) -> bool:
    """Return True if another engine has just computed this request's prompt."""
    return bool(_params(request).get(PREFILLED))


def handoff_tokens(request: Request, limit: int) -> int | None:
    """Return the number of prompt tokens that the prefiller says it has stored; 0: none.

    None if the request names no number, or one beyond `limit`.
    """
    tokens = _params(request).get(PREFILLED_TOKENS)
    if not was_prefilled(request) or type(tokens) is not int:
        return None
    return tokens if 0 <= tokens <= limit else None


def handoff_answer(request: Request, tokens: int) -> dict[str, Any] | None:
    """Return the parameters that a proxy forwards to the decoder; None if this is no prefill.

    `tokens`: the boundary at which the decoder may resume; 0: nothing is stored.
    """
    return {PREFILLED: True, PREFILLED_TOKENS: tokens} if is_prefill(request) else None


def _params(request: Request) -> dict[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}
