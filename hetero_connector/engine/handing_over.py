"""A prompt computed by one engine and decoded by another: what their requests say.

vLLM's proxies send the prompt to a prefiller with `kv_transfer_params["do_remote_decode"]`, and
what its answer says under that name on to the decoder with the same prompt. There is nothing to
say but how much of it is kept: the decoder finds that by the prompt's chain, and waits for no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

_TO_DECODE = "do_remote_decode"
_PREFILLED = "do_remote_prefill"
_TOKENS = "prefilled_tokens"


def is_prefill(request: Request) -> bool:
    """Whether another engine is to go on where this request's prompt ends."""
    return bool(_params(request).get(_TO_DECODE))


def was_prefilled(request: Request) -> bool:
    """Whether another engine has just computed this request's prompt."""
    return bool(_params(request).get(_PREFILLED))


def handoff_tokens(request: Request, limit: int) -> int | None:
    """Up to where a prefiller says that its prompt is kept; 0: nothing of it is.

    None if it does not say, or says what cannot be: something beyond `limit`.
    """
    tokens = _params(request).get(_TOKENS)
    if not was_prefilled(request) or type(tokens) is not int:
        return None
    return tokens if 0 <= tokens <= limit else None


def handed_over(request: Request, tokens: int) -> dict[str, Any] | None:
    """What the answer to a remote prefill tells a proxy to send with the request to its decoder.

    `tokens`: up to where its state is kept, and can be resumed; 0: nothing of it is.
    """
    return {_PREFILLED: True, _TOKENS: tokens} if is_prefill(request) else None


def _params(request: Request) -> dict[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}
