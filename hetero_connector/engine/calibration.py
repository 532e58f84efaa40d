"""`heterocache calibrate`: measure a model's costs on an engine of its own.

A stock engine with HeteroConnector runs prompts of many lengths in three ways: computed, continued
from the engine's own prefix cache (which varies the context), and restored from DRAM and, with an
SSD directory, from SSD. Then prompts are computed while batches decode, which shows how much a
prefill delays decodes. The connector learns from all of it as in service; the profile is what it
has learned. On a GPU the profile also has the pages that copy engines move faster than the kernel.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hetero_connector.config import ONLY_WITH
from hetero_connector.errors import EngineStartError, HeteroCacheError, UnsupportedModelError
from hetero_connector.planner.cost_fit import RelativeErrors
from hetero_connector.planner.cost_model import CostModel, OverheadSample, RequestOverhead
from hetero_connector.planner.profile import CopyEngines, CostProfile, FitError

logger = logging.getLogger("vllm.heterocache")

_SHORTEST = 64
_ROUNDS = 4
_FLUSH_S = 120.0
_BATCHES = (1, 4, 16)
"""Numbers of requests that decode while another request's prompt is computed."""
_DECODES = 48
"""Largest number of tokens that each of them decodes; only some of the steps are timed."""
_TOKEN_IDS = 200
"""Random token ids are below this number: every vocabulary has as many."""
_LEFT_OUT = frozenset({"planner_profile", *ONLY_WITH, *chain(*ONLY_WITH.values())})
"""Keys of the connector's config that calibration leaves out: it must not write to the SSD tier of
a serving engine, nor join its fleet, nor start from an earlier profile."""
_PAUSE_S = 0.1
"""Pause before each measured prompt: the overhead is that of an idle engine."""


class Sample(NamedTuple):
    """One prompt's observed time to first token and the profile's prediction."""

    new_tokens: int
    context_tokens: int
    observed_s: float
    predicted_s: float


@dataclass(frozen=True)
class Calibration:
    """A profile, and the prompts that show its errors."""

    profile: CostProfile
    samples: tuple[Sample, ...]
    """Computed prompts, predicted by the final fit."""


def calibrate(
    model: str,
    engine_arguments: Mapping[str, Any],
    ssd_dir: Path | None,
    dram_gib: float | None = None,
    connector: Mapping[str, Any] | None = None,
) -> Calibration:
    """Run an engine for `model` and learn its costs. Takes a minute or more.

    `engine_arguments` are vLLM's and `connector` is HeteroConnector's extra config, as the engine
    will be served with; its `planner` and keys for SSD, fleet and profile are ignored. `ssd_dir` is
    the directory of the future SSD tier; a directory inside it is used and removed. Without
    `dram_gib` the DRAM tier has the connector's, or 1 GiB. Raises UnsupportedModelError if
    HeteroConnector stores nothing for the model, EngineStartError if vLLM refuses the model or its
    arguments, and ConfigError for the connector's config.
    """
    if model.startswith(("/", ".")) and not Path(model).exists():
        raise EngineStartError(f"there is no model at {model}")
    # The engine core runs in this process, so that its connector can be read.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    given = {key: value for key, value in (connector or {}).items() if key not in _LEFT_OUT}
    extra: dict[str, Any] = {"checkpoints": "full", "dram_gib": 1.0, **given}
    extra["planner"] = "always_load"
    if dram_gib is not None:
        extra["dram_gib"] = dram_gib
    with tempfile.TemporaryDirectory(dir=ssd_dir, prefix="calibration-") as scratch:
        if ssd_dir is not None:
            extra |= {"ssd_dir": scratch, "ssd_gib": dram_gib or 1.0}  # its space is taken whole
        engine = _Engine(model, engine_arguments, extra)
        try:
            computed, costs = list(engine.teach(on_ssd=ssd_dir is not None)), engine.costs
            # Taken before batches decode, because steps that only decode have less to set up.
            profile = CostProfile.of(costs, model, engine.subject)
            engine.teach_interference()
            profile = replace(
                profile,
                interference=costs.interference.coefficients,
                interference_error=FitError.of(costs.interference.errors),
            )
            calibration = _with_overhead(profile, computed, costs.num_steps)
        finally:
            engine.close()
    if engine.is_on_cuda:  # now that nothing else uses the GPU
        profile = replace(calibration.profile, copy_engines=measured_copy_engines())
        calibration = replace(calibration, profile=profile)
    return calibration


def measured_copy_engines() -> CopyEngines | None:
    """Return from which page on copy engines are faster on this GPU; None if that fails."""
    import torch
    from heterocache_cuda.batched import measure_copy_table
    from heterocache_cuda.mover import Mode

    try:
        table = measure_copy_table(torch.device("cuda", torch.cuda.current_device()))
    except (OSError, RuntimeError) as error:
        logger.warning("the GPU's copy engines could not be measured: %s", error)
        return None
    return CopyEngines(table.get(Mode.LOAD), table.get(Mode.SAVE))


class _Computed(NamedTuple):
    """A prompt that was computed on an otherwise idle engine."""

    new_tokens: int
    context_tokens: int
    frontend_s: float
    """Part of the time to first token before and after the engine core."""
    core_s: float
    """Part of the time to first token in the engine core."""

    @property
    def tokens(self) -> int:
        return self.new_tokens + self.context_tokens


def _with_overhead(
    profile: CostProfile, computed: Sequence[_Computed], num_steps: Callable[[int], int]
) -> Calibration:
    """Fit the overhead of a request to the times that the profile does not explain."""
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
    """A stock engine with the connector in it."""

    def __init__(
        self, model: str, engine_arguments: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from hetero_connector.engine.startup.engine_identity import profile_subject

        # Statistics have the times of the first and the last token.
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
        config = self._llm.llm_engine.vllm_config
        self.subject = profile_subject(config)
        self.is_on_cuda = config.device_config.device_type == "cuda"
        self._store = side.store
        self._longest = int(self._llm.llm_engine.model_config.max_model_len) - 8
        self._rng = random.Random(0)
        self._added = 0

    def teach(self, on_ssd: bool) -> Iterator[_Computed]:
        """Run the prompts; yield those that were computed."""
        for round_number in range(_ROUNDS):
            for longest in _lengths(self._longest):
                prompt = self._prompt(self._new_length(longest))
                longer = prompt + self._prompt(self._new_length(longest) // 2)
                for each in (prompt, longer[: self._longest]):
                    time.sleep(_PAUSE_S)
                    ran = self._run(each)
                    if round_number:  # the first round allocates memory and compiles
                        yield ran
                self._restore(prompt, on_ssd)

    def teach_interference(self) -> None:
        """Compute prompts of several lengths while batches of several sizes decode."""
        # Without the longest length, so that there is room for the other requests' steps.
        for length in list(_lengths(self._longest))[:-1]:
            for batch in _BATCHES:
                self._run_while_decoding(batch, self._new_length(length))

    def _run_while_decoding(self, batch: int, length: int) -> None:
        from vllm import SamplingParams

        engine = self._llm.llm_engine

        def add(num_tokens: int, max_tokens: int) -> None:
            prompt = self._prompt(num_tokens)
            parameters = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self._added += 1
            request_id = f"calibration-{self._added}"
            engine.add_request(request_id, {"prompt_token_ids": prompt}, parameters)

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
        """Generate two tokens and time the first, also by vLLM's clock in the engine core."""
        from vllm import SamplingParams, TokensPrompt

        started_s = time.perf_counter()
        parameters = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        inputs = [TokensPrompt(prompt_token_ids=prompt)]
        (output,) = self._llm.generate(inputs, parameters, use_tqdm=False)
        total_s = time.perf_counter() - started_s
        times, cached = output.metrics, int(output.num_cached_tokens or 0)
        assert times is not None, "the engine logs its statistics"
        frontend_s = total_s - (times.last_token_ts - times.queued_ts)
        core_s = times.first_token_ts - times.queued_ts
        return _Computed(len(prompt) - cached, cached, frontend_s, core_s)

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(_TOKEN_IDS) for _ in range(length)]

    def _new_length(self, longest: int) -> int:
        """Return a random length, at most a quarter shorter.

        In service prompts rarely have the same length, and steps of new shapes take longer because
        a backend prepares for each.
        """
        return longest - self._rng.randrange(max(1, longest // 4))

    def close(self) -> None:
        core: Any = self._llm.llm_engine.engine_core
        core.shutdown()


def _lengths(longest: int) -> Iterator[int]:
    """Yield prompt lengths that double up to the longest that the engine takes."""
    length = min(_SHORTEST, longest)
    while length < longest:
        yield length
        length *= 2
    yield longest
