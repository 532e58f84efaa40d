"""The port between the proxy and what decides where a request runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ownership.router.doors import Refusal
from ownership.router.requests import RouterRequest
from ownership.router.workers import Worker
from ownership.scheduling import Ledger, WorkerPrefix


class Forecast(NamedTuple):
    """The outcome of a placement that a policy expects."""

    prompt_tokens: int
    resume_tokens: int
    """Tokens that the worker need not compute."""
    prefixes: Mapping[str, WorkerPrefix]
    """The part that each worker has itself; workers with nothing are left out."""
    ttft_s: float
    cost_s: dict[str, float]
    """The price by term."""


Candidates = Callable[[], Sequence[Worker]]
"""Returns the workers to choose from, at least one, as they are when it is called. It is called
once. If there is none it raises an error, which placers pass on."""


class Prefill(NamedTuple):
    """A prompt that another worker computes before the request is sent to the one that decodes."""

    worker: Worker
    body: bytes


@dataclass(eq=False, slots=True)
class Placed:
    """A request and the worker that it is sent to."""

    request: RouterRequest
    worker: Worker
    prefill: Prefill | None = None
    """None: the worker computes the prompt itself."""
    body: bytes | None = None
    """The body for the worker, if it is not the client's: with `kv_transfer_params`, say."""
    certainty: str = ""
    """A `Certainty`: the worth of what was known of the prompt's state. "" if it was not asked."""
    reasons: Sequence[str] = ()
    """Reasons why it is not exact, by names from a fixed set."""
    answer_id: str = ""
    """The id in the worker's answer; "" if it has none, or none was found."""
    action: str = ""
    """The work that the placement causes: a `PlacementAction`."""
    predicted_ttft_s: float | None = None
    """Seconds from the sending to the first token; None if nothing was predicted."""
    prompt_tokens: int = 0
    """Tokens of the prompt, for each naming of chunks in the fleet; 0 if they are not known."""
    tokenized: int = 0
    """The part of these tokens that was made for this request; the others were known."""
    session_id: str = ""
    """A digest of the session that the request names; "" if it names none, or none is asked for."""

    def forecast(self) -> Forecast | None:
        """Return what was expected; None without a policy. To be asked before it is sent."""
        return None

    def move(self, worker: Worker) -> None:
        """Another worker gets it than was chosen, and computes the prompt. Not while it counts as
        sent."""
        self.worker = worker


class Placer(Protocol):
    """Chooses workers. All calls are made on the event loop, none may block it.

    For each `Placed` that is sent, `on_sent` is called, with a `prefill` then `on_prefilled`, then
    at most one `on_first_byte`, then one of `on_ended` and `on_failed`. One of these two may come
    at any time.
    """

    @property
    def ledger(self) -> Ledger | None:
        """The count of what is under way; None if nothing is counted, or no worker is known."""
        ...

    async def place(self, request: RouterRequest, candidates: Candidates) -> Placed | Refusal:
        """Choose one of the candidates, or refuse. What takes time is done before asking for them.

        Raises what `candidates` raises.
        """
        ...

    def on_sent(self, placed: Placed, now_s: float) -> None: ...

    def on_prefilled(self, placed: Placed, answer: bytes, problem: str, now_s: float) -> None:
        """The prefill has ended, and the worker gets the request now, with `placed.body`.

        `answer`: the prefill worker's. `problem`: why there is none, else "".
        """
        ...

    def on_first_byte(self, placed: Placed, now_s: float) -> None: ...

    def on_ended(self, placed: Placed, num_events: int, now_s: float) -> None:
        """The answer is complete, or its client has left. `num_events`: those streamed so far."""
        ...

    def on_failed(self, placed: Placed, now_s: float) -> None:
        """The worker was lost, or has answered with an error.

        The request may be placed again if it has had no byte.
        """
        ...


class LeastLoaded:
    """Takes the worker with the fewest requests, by turns among equals. It knows no prefixes."""

    ledger: Ledger | None = None

    def __init__(self) -> None:
        self._turn = 0

    async def place(self, request: RouterRequest, candidates: Candidates) -> Placed | Refusal:
        found = candidates()
        least = min(worker.in_flight for worker in found)
        equal = [worker for worker in found if worker.in_flight == least]
        self._turn += 1
        return Placed(request, equal[self._turn % len(equal)])

    def on_sent(self, placed: Placed, now_s: float) -> None:
        pass

    def on_prefilled(self, placed: Placed, answer: bytes, problem: str, now_s: float) -> None:
        pass

    def on_first_byte(self, placed: Placed, now_s: float) -> None:
        pass

    def on_ended(self, placed: Placed, num_events: int, now_s: float) -> None:
        pass

    def on_failed(self, placed: Placed, now_s: float) -> None:
        pass
