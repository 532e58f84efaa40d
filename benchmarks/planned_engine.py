"""An engine with a restore planner and a disk speed that a benchmark sets for each request."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.engine_process import Engine, prompt_tokens
from benchmarks.throttled_files import ThrottledFiles
from hetero_connector.artifacts.record import StoredChunk
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.planner import Mode, RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.tier import best_transfer
from hetero_connector.transfer.base import FileTransfer

CUTS = (0.25, 0.5, 0.75)
_MODES: dict[str, Mode] = {
    "never": "never_load",
    "always": "always_load",
    "planned": "cost",
    "cut": "always_load",
}
_UNTHROTTLED = 1e12
_MAX_STEPS = 100_000


class SteeredPlanner:
    """The connector's planner, with a limit that a benchmark sets, and its first decision."""

    def __init__(self, planner: RestorePlanner) -> None:
        self.planner = planner
        self.limit_tokens: int | None = None
        """The last boundary to restore, by a checkpoint; None: no limit."""
        self.first: RestoreDecision | None = None
        """The first decision since this was set to None."""

    def plan(
        self,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        limit_tokens: int,
        prompt_tokens: int,
        load: EngineLoad,
        *,
        may_replay: bool = True,
        deadline_s: float = math.inf,
    ) -> RestoreDecision:
        """See `RestorePlanner.plan`."""
        if self.limit_tokens is not None:
            limit_tokens, may_replay = min(limit_tokens, self.limit_tokens), False
        decision = self.planner.plan(
            stored,
            local_tokens,
            limit_tokens,
            prompt_tokens,
            load,
            may_replay=may_replay,
            deadline_s=deadline_s,
        )
        self.first = self.first or decision
        return decision


class PlannedEngine(Engine):
    """An `Engine` that serves a prompt by a policy: never, always, planned, or up to a share."""

    def __init__(
        self, model: str, extra: Mapping[str, Any] | None, engine_args: Mapping[str, Any]
    ) -> None:
        self._disk: ThrottledFiles | None = None
        # The connector opens the store with its default: the one place where it can be slowed.
        opening: Any = ArtifactStore.open
        opening.__func__.__kwdefaults__["open_transfer"] = self._open_throttled
        super().__init__(model, extra, engine_args)
        core: Any = self._llm.llm_engine.engine_core
        self._restorer = core.engine_core.scheduler.connector._scheduler._restorer
        self._steered = self._restorer._planner = SteeredPlanner(self._restorer._planner)
        self._on_ssd = False
        self._decoding = 0
        self._seed = 1_000_000

    def throttle(self, bandwidth: float | None) -> None:
        """Set the SSD's bytes a second from now on; None: serve from DRAM."""
        self._on_ssd = bandwidth is not None
        assert self._disk is not None
        self._disk.read_bandwidth = bandwidth or _UNTHROTTLED

    def serve(self, prompt: list[int], policy: str, decodes: int) -> tuple[float, int]:
        """Return TTFT in seconds and the tokens not computed, while `decodes` others run."""
        self._prepare()
        self._set(policy, len(prompt))
        others = [self._start_decoding() for _ in range(decodes)]
        started_s = time.perf_counter()
        self._add("probe", prompt, 1)
        cached = -1
        for _ in range(_MAX_STEPS):
            for output in self._llm.llm_engine.step():
                if output.request_id.startswith("probe"):
                    cached = int(output.num_cached_tokens or 0)
            if cached >= 0:
                break
        ttft_s = time.perf_counter() - started_s
        self._llm.llm_engine.abort_request(others)
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()
        return ttft_s, cached

    def _prepare(self) -> None:
        """Leave the prompt in the store only, in the wanted tier."""
        self.reset_prefix_cache()
        if self._on_ssd:
            self.flush()
            self._store().leave_to_ssd()

    def _set(self, policy: str, num_tokens: int) -> None:
        mode, _, share = policy.partition(" ")
        self._steered.planner.mode = _MODES[mode]
        self._steered.limit_tokens = int(float(share) * num_tokens) if share else None

    def _start_decoding(self) -> str:
        """Start a request with its own prompt that decodes for longer than a measurement."""
        self._seed += 1
        name = f"other-{self._seed}"
        self._add(name, prompt_tokens(64, self._seed), 200)
        for _ in range(4):
            self._llm.llm_engine.step()
        return name

    def _add(self, name: str, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)

    def _open_throttled(self, memory: np.ndarray, directory: SsdDirectory) -> FileTransfer:
        self._disk = ThrottledFiles(best_transfer(memory, directory), _UNTHROTTLED)
        return self._disk
