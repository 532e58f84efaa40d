"""The answers of the routes: what all engines of the server say, or one error."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from hetero_connector.engine.api.engines import Answer, Engines


def answered(engines: Engines, answers: list[Answer], *, is_command: bool = False) -> JSONResponse:
    """Return the answers. 503 if there is none.

    A command that one engine did not carry out is an error: 400 if its arguments are wrong, else
    409. The body says which engines did.
    """
    body = {"engines": answers, "count": engines.count}
    problems = [answer for answer in answers if "error" in answer]
    text = "; ".join(dict.fromkeys(str(answer["error"]) for answer in problems))
    if not answers or (len(problems) == len(answers) and not is_command):
        return failed(503, text or _NOT_HERE, body)
    if problems and is_command:
        is_malformed = all(answer.get("malformed") for answer in problems)
        return failed(400 if is_malformed else 409, text, body)
    return JSONResponse(body)


def failed(status: int, message: str, more: Answer | None = None) -> JSONResponse:
    """Return an error in the form of vLLM's own."""
    error = {"message": message, "type": "heterocache", "code": status}
    return JSONResponse({**(more or {}), "error": error}, status_code=status)


NO_ENGINES = (
    "this server has no engine with HeteroConnector: start it with --kv-transfer-config "
    """'{"kv_connector": "HeteroConnector", "kv_role": "kv_both"}'"""
)
_NOT_HERE = (
    "no engine of this server has opened a socket on this host: see the engines' logs, and ask "
    "engines on other hosts there with `heterocache status`"
)
