"""A prompt computed by one engine and decoded by another: what their requests say.

vLLM's proxies send the prompt to a prefiller with `kv_transfer_params["do_remote_decode"]`, and
what its answer says under that name on to the decoder with the same prompt. There is nothing to
say but where to resume: the decoder finds the rest by the prompt's chain.
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


def handoff_tokens(request: Request, limit: int) -> int:
    """Where a prefiller says that its prompt can be resumed; 0 if nowhere up to `limit`."""
    tokens = _params(request).get(_TOKENS)
    if not was_prefilled(request) or type(tokens) is not int:
        return 0
    return tokens if 0 < tokens <= limit else 0


def handed_over(request: Request, tokens: int) -> dict[str, Any] | None:
    """What the answer to a remote prefill tells a proxy to send with the request to its decoder.

    `tokens`: where it may resume, beside the boundaries on the engine's grid; 0 for nowhere.
    """
    if not is_prefill(request):
        return None
    return {_PREFILLED: True, _TOKENS: tokens} if tokens else {_PREFILLED: True}


def _params(request: Request) -> dict[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}
