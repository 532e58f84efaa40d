"""Record a simulation as a timeline: steps of engines, transfers, and what requests wait for."""

from __future__ import annotations

from collections.abc import Callable

from hetero_connector.timeline import Activity, Timeline
from ownership.simulator.machine.engine import StepRecord
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.worker import Worker


class Recording:
    """Adds what the workers of a fleet do to a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._handed_off_s: dict[LiveRequest, float] = {}

    def watch(self, worker: Worker) -> None:
        """Record the steps and the transfers of a worker from now on."""
        worker.engine.on_step = lambda step: self._add_step(worker.name, step)
        channels = {
            "SSD reads": worker.ssd_reads,
            "from peers": worker.incoming,
            "to peers": worker.outgoing,
        }
        for track, channel in channels.items():
            channel.on_transfer = self._adder(worker.name, track)

    def add_request(self, worker: str, request: LiveRequest, now_s: float) -> None:
        """Record a request's time at a worker, which ends now: with an answer, or a handoff."""
        begin_s = self._handed_off_s.pop(request, request.arrived_s)
        name = f"session {request.session}, request {request.index}"
        parts = [("wait", begin_s, request.admitted_s)]
        if request.decodes_elsewhere:
            self._handed_off_s[request] = now_s
            parts.append(("prefill", request.admitted_s, now_s))
        elif request.admitted_s <= request.first_token_s:
            parts.append(("prefill", request.admitted_s, request.first_token_s))
            parts.append(("decode", request.first_token_s, now_s))
        hits = request.decoder_hits or request.hits
        details = {
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "hbm_tokens": hits.hbm,
            "dram_tokens": hits.dram,
            "ssd_tokens": hits.ssd,
            "peer_tokens": hits.peer,
        }
        self._timeline.add(
            worker, Activity("requests", name, begin_s, now_s, details, tuple(parts))
        )

    def _add_step(self, worker: str, step: StepRecord) -> None:
        name = "prefill" if step.prefill_tokens else "decode"
        details = step._asdict()
        begin_s, end_s = details.pop("begin_s"), details.pop("end_s")
        self._timeline.add(worker, Activity("engine", name, begin_s, end_s, details))
        if step.load_s:
            loaded_s = begin_s + step.load_s
            self._timeline.add(worker, Activity("loads from DRAM", "load", begin_s, loaded_s))

    def _adder(self, worker: str, track: str) -> Callable[[float, float], None]:
        return lambda begin_s, end_s: self._timeline.add(
            worker, Activity(track, "transfer", begin_s, end_s)
        )
