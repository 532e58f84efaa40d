"""A scheduler side with a real store but without an engine: tests run its steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import ArtifactCopy, Load, StepMetadata, WorkerReport
from hetero_connector.engine.scheduler.block_events import BlockEvents, EventGroup
from hetero_connector.engine.scheduler.fleet import Fleet
from hetero_connector.engine.scheduler.scheduler_side import Policies, SchedulerSide
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.planner.checkpoints import CheckpointPolicy, Full
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import Mode, RestorePlanner
from hetero_connector.planner.pricing import Parking
from hetero_connector.spec import ModelSpec
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.peers.ports import PeerAccess
from tests.engine.fakes import FakeBlockTables, FakeRequest, scheduled
from tests.waiting import until

CHUNK = 64

LOAD_DEADLINE_S = 20.0


class Engine:
    """A scheduler side with its store, whose steps the test runs."""

    def __init__(
        self,
        model: ModelSpec,
        dram_bytes: int = 1 << 20,
        checkpoints: CheckpointPolicy | None = None,
        mode: Mode = "always_load",
        window_replay: WindowReplay | None = None,
        fleet: Fleet | None = None,
        peers: PeerAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
        run_io: bool = True,
        parking: Parking = "never",
        event_group: EventGroup | None = None,
        num_ranks: int | None = None,
        **store: Any,
    ) -> None:
        """`parking`: `ask` checks the answers for "never" and "always" only.

        With an `event_group` there are block events.
        """
        self.parking = parking
        self.asks_again = fleet is not None
        self.layout = ArtifactLayout(model, CHUNK)
        self.recorder = Recorder()
        self.store = ArtifactStore.open(
            self.layout.max_bytes,
            StoreConfig(dram_bytes=dram_bytes, **store),
            self.recorder,
            chunk_tokens=CHUNK,
            fingerprint=b"f" * 32,
            description={},
            clock=clock,
            peers=peers,
            run_io=run_io,
        )
        if fleet is not None:
            assert self.store.sharing is not None
            fleet.start(self.store.sharing)
        self.costs = CostModel(ComputeRegression(), LoadModel(model.state_types))
        replay_tokens = window_replay.tokens if window_replay else 0
        planner = RestorePlanner(self.layout, self.costs, mode, replay_tokens=replay_tokens)
        events = None
        if event_group is not None:
            replay = replay_tokens if window_replay else None
            events = BlockEvents(event_group, model, self.store, replay)
        self.side = SchedulerSide(
            self.layout, ChainHasher(b"f" * 32, CHUNK), self.store, self.recorder,
            Policies(planner, checkpoints or Full(), window_replay),
            layerwise=True, parking=parking, load_deadline_s=LOAD_DEADLINE_S, fleet=fleet,
            events=events, clock=clock, num_ranks=num_ranks,
        )  # fmt: skip
        self.tables = FakeBlockTables()
        self.side.bind(self.tables)  # type: ignore[arg-type]
        self.requests: dict[str, FakeRequest] = {}
        self.next_block = 1

    def admit(self, request: FakeRequest, local: int = 0) -> int:
        """Match, allocate and mark the restored tokens as computed; return their number."""
        self.requests[request.request_id] = request
        identified = request.lora_request is not None or bool(request.mm_features)
        asks = self.answered if self.asks_again or identified else self.ask
        tokens = asks(request, local)
        assert tokens is not None
        self.grow_table(request)
        self.side.on_allocated(request, tokens)  # type: ignore[arg-type]
        self.side.root.on_admitted(request)  # type: ignore[arg-type]
        request.num_computed_tokens = local + tokens
        request.status = RequestStatus.RUNNING
        return tokens

    def ask(self, request: FakeRequest, local: int = 0) -> int | None:
        """Return the restorable tokens; None while they are being staged."""
        tokens, parked = self.side.match(request, local)  # type: ignore[arg-type]
        assert parked == bool(tokens and self.parking == "always")
        return tokens

    def answered(self, request: FakeRequest, local: int = 0) -> int:
        """Ask until nothing is being staged; return the restorable tokens."""

        def answer() -> tuple[int, ...]:
            tokens = self.ask(request, local)
            return () if tokens is None else (tokens,)

        return until(answer, f"{request.request_id} is answered")[0]

    def grow_table(self, request: FakeRequest) -> None:
        """Give the request a block per 16 tokens in both groups; window blocks are not recycled."""
        blocks = -(-request.num_tokens // 16)
        tables = self.tables.ids.get(request.request_id, ([], []))
        for group in tables:
            while len(group) < blocks:
                group.append(self.next_block)
                self.next_block += 1
        self.tables.ids[request.request_id] = tables

    def step(self, **num_tokens: int) -> StepMetadata:
        """Run one engine step, in which the workers report everything as done."""
        meta = self.order(**num_tokens)
        self.report(meta)
        return meta

    def order(self, **num_tokens: int) -> StepMetadata:
        """Order a step that the workers have not reported yet."""
        meta = self.side.order_step(scheduled(**num_tokens))  # type: ignore[arg-type]
        for request_id, count in num_tokens.items():
            self.requests[request_id].num_computed_tokens += count
        return meta

    def report(self, meta: StepMetadata) -> None:
        saved: Counter[int] = Counter()
        for save in [*meta.saves, *meta.early_saves]:
            saved.update(save.save_ids)
        loaded = Counter(load.load_id for load in meta.loads)
        self.side.on_report(WorkerReport(saved, loaded))

    def run(self, request: FakeRequest) -> int:
        """Admit, prefill in one step, finish, and run the step of the early saves."""
        restored = self.admit(request)
        self.step(**{request.request_id: request.num_tokens - restored})
        self.finish(request)
        self.step()
        return restored

    def finish(self, request: FakeRequest) -> int:
        """Finish the request; return the token at which a decoder may resume."""
        blocks = self.tables.ids.get(request.request_id, ([], []))
        return self.side.on_finished(request, blocks).handoff_tokens  # type: ignore[arg-type]

    def counters(self) -> dict[str, float]:
        payload = self.recorder.drain()
        return payload[COUNTERS] if payload else {}


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + i * 31) % 251 for i in range(count)]


def artifacts_of(load: Load) -> list[ArtifactCopy]:
    """Return the artifacts of a load one by one."""
    return [artifact for span in load.spans for artifact in span.artifacts()]


def in_use(engine: Engine) -> list:  # type: ignore[type-arg]
    return engine.store.catalog.tiers.pinned()
