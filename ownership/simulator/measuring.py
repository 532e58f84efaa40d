"""From what a simulation counted to its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from hetero_connector.spec.state_types import StateType
from ownership.simulator.machine.channel import Flow
from ownership.simulator.machine.worker import Flows, Worker
from ownership.simulator.results import Figures, Overhead, mean, percentile
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape

_GIB = 1 << 30
_Number = TypeVar("_Number", int, float)


def figures_of(done: FleetSimulation) -> Figures:
    """Of a simulation that has run."""
    tally, workers = done.tally, list(done.workers.values())
    served = len(tally.step_s)

    def total(count: Callable[[Worker], _Number]) -> _Number:
        return sum((count(w) for w in workers[1:]), count(workers[0]))

    def moved(flow: str) -> int:
        return sum(_flow_bytes(done.shape, getattr(w.flows, flow)) for w in workers)

    span_s = max(0.0, done.ended_s - done.sessions.first_start_s)
    decode_s = total(lambda w: w.engine.totals.decode_s)
    resident_s = total(lambda w: w.engine.totals.resident_s)
    session_bytes = _over(total(lambda w: w.engine.totals.resident_byte_s), resident_s)
    distinct_bytes = done.shape.moved_bytes(done.asked_for.distinct(), 0)
    busy_s, idle_s = total(lambda w: w.engine.totals.busy_s), total(lambda w: w.idle_s)
    hbm, dram, ssd, peer = tally.hits
    waits_s = [_over(wait_s, served) for wait_s in tally.waits_s]
    written_bytes, network_bytes, read_bytes = moved("written"), moved("fetched"), moved("staged")
    moved_bytes = written_bytes + network_bytes + read_bytes
    copies = mean(tally.duplicates) or done.duplicate_factor()
    return Figures(
        requests=served,
        refused=tally.refused,
        sessions=len(tally.task_s),
        span_s=span_s,
        ttft_mean_s=mean(tally.ttft_s),
        ttft_p50_s=percentile(tally.ttft_s, 50),
        ttft_p95_s=percentile(tally.ttft_s, 95),
        ttft_p99_s=percentile(tally.ttft_s, 99),
        task_mean_s=mean(tally.task_s),
        task_p50_s=percentile(tally.task_s, 50),
        task_p95_s=percentile(tally.task_s, 95),
        task_wait_mean_s=mean(tally.task_wait_s),
        task_wait_p95_s=percentile(tally.task_wait_s, 95),
        step_p50_s=percentile(tally.step_s, 50),
        step_p95_s=percentile(tally.step_s, 95),
        step_p99_s=percentile(tally.step_s, 99),
        token_mean_s=_over(decode_s, total(lambda w: w.engine.totals.decoded_tokens)),
        hbm_gib_per_session=session_bytes / _GIB,
        resent=tally.resent,
        most_live_sessions=done.sessions.most_live,
        most_running=max(w.engine.totals.most_running for w in workers),
        sessions_in_hbm=_over(total(lambda w: w.spec.capacity.hbm), session_bytes),
        prompt_tokens=tally.prompt_tokens,
        matched_tokens=tally.matched_tokens,
        saved_tokens=hbm + dram + ssd + peer,
        hbm_hit_tokens=hbm,
        dram_hit_tokens=dram,
        ssd_hit_tokens=ssd,
        peer_hit_tokens=peer,
        duplicate_factor=copies,
        moved_bytes=moved_bytes,
        moved_bytes_times_copies=moved_bytes * copies,
        network_bytes=network_bytes,
        ssd_read_bytes=read_bytes,
        ssd_written_bytes=written_bytes,
        dram_loaded_bytes=moved("loaded"),
        sealed_bytes=moved("sealed"),
        write_amplification=_over(written_bytes, distinct_bytes),
        owner_hit_rate=_over(tally.owner_hits, tally.owned_turns),
        moved_sessions=tally.moved_sessions,
        decode_late_share=_over(total(lambda w: w.engine.totals.late_s), decode_s),
        busy_share=_over(busy_s, span_s * len(workers)),
        tool_idle_busy_share=_over(total(lambda w: w.busy_while_idle_s), idle_s),
        queue_mean_s=waits_s[0],
        restore_network_mean_s=waits_s[1],
        restore_ssd_mean_s=waits_s[2],
        restore_exposed_mean_s=_over(total(lambda w: w.engine.totals.exposed_s), served),
        preemptions=total(lambda w: w.engine.totals.preemptions),
        prefetched_bytes=total(lambda w: w.prefetched_bytes),
        replicas=done.replicating.copies if done.replicating else 0,
    )


def state_bytes_of(
    done: FleetSimulation, workers: Iterable[Worker] | None = None
) -> Mapping[str, Mapping[str, int]]:
    """Bytes by flow and state type, of these workers together; by default of all."""
    chosen = list(done.workers.values() if workers is None else workers)
    names = Flows.__dataclass_fields__
    return {
        name: {
            state_type.value: sum(
                _type_bytes(done.shape, getattr(worker.flows, name), state_type)
                for worker in chosen
            )
            for state_type in done.shape.model.state_types
        }
        for name in names
    }


def overhead_of(done: FleetSimulation, wall_s: float) -> Overhead:
    """What deciding took."""
    decisions = done.tally.decision_s
    return Overhead(
        len(decisions),
        1e6 * percentile(decisions, 50),
        1e6 * mean(decisions),
        1e6 * percentile(decisions, 99),
        wall_s,
    )


def _flow_bytes(shape: StateShape, flow: Flow) -> int:
    return sum(_type_bytes(shape, flow, kind) for kind in shape.model.state_types)


def _type_bytes(shape: StateShape, flow: Flow, state_type: StateType) -> int:
    is_prefix, artifact_bytes = state_type in shape.prefix_bytes, shape.layout.artifact_bytes
    short = flow.short if is_prefix else flow.short_checkpoints
    short_bytes = sum(count * artifact_bytes(state_type, *span) for span, count in short.items())
    if is_prefix:
        return flow.chunks * shape.prefix_bytes[state_type] + short_bytes
    return short_bytes + sum(
        count * artifact_bytes(state_type, 0, boundary * shape.chunk_tokens)
        for boundary, count in flow.checkpoints.items()
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
