"""`heterocache calibrate`: teach a cost model on an engine of its own, and write it down.

A stock engine with HeteroConnector runs prompts of many lengths, each three ways: computed,
continued from the engine's own prefix cache (which varies the context), and restored from
DRAM and, with an SSD directory, from SSD. Then batches decode while a prompt is computed beside
them, which shows what a prefill does to decodes. The connector learns from all of it as it would
in service; what it then knows is the profile.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hetero_connector.errors import EngineStartError, HeteroCacheError, UnsupportedModelError
from hetero_connector.planner.cost_fit import RelativeErrors
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.profile import CostProfile, FitError
from hetero_connector.planner.request_overhead import OverheadSample, RequestOverhead

_SHORTEST = 64
_ROUNDS = 4
_FLUSH_S = 120.0
_BATCHES = (1, 4, 16)
"""Requests that decode while another's prompt is computed."""
_DECODES = 48
"""Tokens each of them decodes at most; only some of the steps are timed."""
_TOKEN_IDS = 200
"""Random ids are drawn below this: every vocabulary has as many."""
_ITS_OWN = frozenset(
    {
        "ssd_dir", "ssd_gib", "ssd_write_gib_per_day", "planner_profile",
        "directory", "lease_s", "replica_ttl_s", "worker_name", "peer_host",
    }
)  # fmt: skip
"""Of the connector's config, what calibration leaves out: it must neither write to the SSD tier of
an engine that serves, nor join its fleet, nor start from an earlier profile."""
_PAUSE_S = 0.1
"""Before each prompt whose overhead counts: it is that of an engine which was idle."""


class Sample(NamedTuple):
    """One prompt's time to first token against what the profile says of it."""

    new_tokens: int
    context_tokens: int
    observed_s: float
    predicted_s: float


@dataclass(frozen=True)
class Calibration:
    """What was learned, and the prompts to judge it by."""

    profile: CostProfile
    samples: tuple[Sample, ...]
    """Prompts that were computed, judged by the final fit."""


def calibrate(
    model: str,
    engine_arguments: Mapping[str, Any],
    ssd_dir: Path | None,
    dram_gib: float,
    connector: Mapping[str, Any] | None = None,
) -> Calibration:
    """Run an engine for `model` and learn its costs. Takes a minute or more.

    `engine_arguments`: vLLM's, and `connector`: HeteroConnector's extra config, as the engine will
    be served with; its SSD, its fleet and its profile are left alone. `ssd_dir`: where its SSD
    tier will be; a directory inside it is used and removed. Raises UnsupportedModelError if
    HeteroConnector stores nothing for the model, EngineStartError if vLLM refuses the model or
    the arguments, ConfigError for the connector's.
    """
    if model.startswith(("/", ".")) and not Path(model).exists():
        raise EngineStartError(f"there is no model at {model}")
    # The engine core in this process: its connector is asked for what it learned.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    given = {key: value for key, value in (connector or {}).items() if key not in _ITS_OWN}
    extra: dict[str, Any] = {"checkpoints": "full", **given}
    extra |= {"dram_gib": dram_gib, "planner": "always_load"}
    with tempfile.TemporaryDirectory(dir=ssd_dir, prefix="calibration-") as scratch:
        if ssd_dir is not None:
            extra |= {"ssd_dir": scratch, "ssd_gib": dram_gib}
        engine = _Engine(model, engine_arguments, extra)
        try:
            computed, costs = list(engine.teach(on_ssd=ssd_dir is not None)), engine.costs
            # Before batches decode: steps that only decode have less to set up.
            profile = CostProfile.of(costs, model, engine.subject)
            engine.teach_interference()
            profile = replace(
                profile,
                interference=costs.interference.coefficients,
                interference_error=FitError.of(costs.interference.errors),
            )
            return _judged(profile, computed, costs.num_steps)
        finally:
            engine.close()


class _Computed(NamedTuple):
    """A prompt that was computed, on an engine with nothing else to do."""

    new_tokens: int
    context_tokens: int
    frontend_s: float
    """Of its time to first token, what passed before the engine core had it, and after."""
    core_s: float
    """The rest."""

    @property
    def tokens(self) -> int:
        return self.new_tokens + self.context_tokens


def _judged(
    profile: CostProfile, computed: Sequence[_Computed], num_steps: Callable[[int], int]
) -> Calibration:
    """What a profile leaves of the seconds that prompts took is the overhead of a request."""
    steps_s = [
        profile.compute.prompt_s(x.new_tokens, x.context_tokens, num_steps(x.new_tokens))
        for x in computed
    ]
    overhead = RequestOverhead.fitted(
        [
            OverheadSample(x.tokens, x.frontend_s, x.core_s - s)
            for x, s in zip(computed, steps_s, strict=True)
        ]
    )
    errors, samples = RelativeErrors(), []
    for x, s in zip(computed, steps_s, strict=True):
        predicted_s = s + overhead.total_s(x.tokens)
        samples.append(Sample(x.new_tokens, x.context_tokens, x.frontend_s + x.core_s, predicted_s))
        errors.add(predicted_s, samples[-1].observed_s)
    profile = replace(profile, overhead=overhead, overhead_error=FitError.of(errors))
    return Calibration(profile, tuple(samples))


class _Engine:
    """A stock engine and the connector in it."""

    def __init__(
        self, model: str, engine_arguments: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from hetero_connector.engine.startup.engine_identity import profile_subject

        # Statistics tell the first token's time from the last's.
        arguments = {"enable_prefix_caching": True, **engine_arguments, "disable_log_stats": False}
        connector = KVTransferConfig(
            kv_connector="HeteroConnector", kv_role="kv_both", kv_connector_extra_config=dict(extra)
        )
        try:
            self._llm = LLM(model=model, kv_transfer_config=connector, **arguments)
        except HeteroCacheError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # arguments, memory
            reason = " ".join(str(error).split())
            raise EngineStartError(f"vLLM starts no engine for {model}: {reason}") from error
        core: Any = self._llm.llm_engine.engine_core
        side = core.engine_core.scheduler.connector._scheduler
        if side is None:
            self.close()
            raise UnsupportedModelError(f"HeteroConnector stores nothing for {model}")
        self.costs: CostModel = side.costs
        self.subject = profile_subject(self._llm.llm_engine.vllm_config)
        self._store = side.store
        self._longest = int(self._llm.llm_engine.model_config.max_model_len) - 8
        self._rng = random.Random(0)
        self._added = 0

    def teach(self, on_ssd: bool) -> Iterator[_Computed]:
        """Run the prompts; yields those that computed."""
        for round_number in range(_ROUNDS):
            for longest in _lengths(self._longest):
                prompt = self._prompt(self._new_length(longest))
                longer = prompt + self._prompt(self._new_length(longest) // 2)
                for each in (prompt, longer[: self._longest]):
                    time.sleep(_PAUSE_S)
                    ran = self._run(each)
                    if round_number:  # the first touches memory and compiles
                        yield ran
                self._restore(prompt, on_ssd)

    def teach_interference(self) -> None:
        """Compute prompts of several lengths while batches of several sizes decode."""
        for length in list(_lengths(self._longest))[:-1]:  # with room for the others' steps
            for batch in _BATCHES:
                self._run_beside(batch, self._new_length(length))

    def _run_beside(self, batch: int, length: int) -> None:
        from vllm import SamplingParams

        engine = self._llm.llm_engine

        def add(num_tokens: int, max_tokens: int) -> None:
            prompt = self._prompt(num_tokens)
            parameters = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self._added += 1
            engine.add_request(f"beside-{self._added}", {"prompt_token_ids": prompt}, parameters)

        short = min(_SHORTEST, self._longest // 2)
        for _ in range(batch):
            add(short, min(_DECODES, self._longest - short))
        for _ in range(_DECODES // 4):  # by then all of them decode
            engine.step()
        add(length, 1)
        while engine.has_unfinished_requests():
            engine.step()

    def _restore(self, prompt: list[int], on_ssd: bool) -> None:
        self._llm.reset_prefix_cache()
        self._run(prompt)
        if on_ssd and self._store.flush(_FLUSH_S):
            self._llm.reset_prefix_cache()
            self._store.leave_to_ssd()
            self._run(prompt)

    def _run(self, prompt: list[int]) -> _Computed:
        """Have two tokens answered; the first is timed, by vLLM's clock of the engine core too."""
        from vllm import SamplingParams

        started_s = time.perf_counter()
        parameters = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        total_s = time.perf_counter() - started_s
        told, cached = output.metrics, int(output.num_cached_tokens or 0)
        frontend_s = total_s - (told.last_token_ts - told.queued_ts)
        core_s = told.first_token_ts - told.queued_ts
        return _Computed(len(prompt) - cached, cached, frontend_s, core_s)

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(_TOKEN_IDS) for _ in range(length)]

    def _new_length(self, longest: int) -> int:
        """A quarter less at most. In service hardly a prompt is as long as another, and steps of
        new shapes take longer: a backend has to prepare for each."""
        return longest - self._rng.randrange(max(1, longest // 4))

    def close(self) -> None:
        """End the engine."""
        core: Any = self._llm.llm_engine.engine_core
        core.shutdown()


def _lengths(longest: int) -> Iterator[int]:
    """Prompt lengths, doubling, up to the longest the engine takes."""
    length = min(_SHORTEST, longest)
    while length < longest:
        yield length
        length *= 2
    yield longest
