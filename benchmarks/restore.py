"""`python -m benchmarks.restore [--json]`: the cost of restoring and saving on a real engine.

Every figure is a ratio of medians from one run, each measured together with its reference:

- `dram_over_memcpy`: (TTFT restored from DRAM - TTFT of the engine's own prefix hit), over one
  plain memcpy of the restored bytes into mapped memory.
- `ssd_over_dd`: bandwidth of the SSD restore, over that of an O_DIRECT dd of the same size in the
  same directory. Its seconds are those that the SSD adds to the TTFT of a restore from DRAM: it
  reads, verifies, and waits until vLLM asks again. `ssd_over_limit`: over the upper limit of the
  device, four parallel O_DIRECT reads into huge pages.
- `prefill_save_ratio`, `decode_ratio`: seconds of a cold prefill and of a decoded token with
  saving, over the same work in an engine without a connector. The decoded
  tokens complete a chunk. `..._vs_off`: over the same engine when it recomputes stored state, and
  so saves nothing.

An engine that was idle answers later than one that has just worked, so each computes a few tokens
before every completion that is timed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess, Timing, prompt_tokens
from benchmarks.goals import goal_table
from benchmarks.measure import DirectDisk, Memcpy, Samples, machine_line, publish, rounded, table
from examples.cpu_kernels import runnable
from hetero_connector.units import GIB

_RATIO_FROM_BYTES = 50_000_000
"""Smaller restores take mostly their fixed costs, so their ratios are not printed."""
_KV_CACHE_BYTES = GIB  # examples.serving.ENGINE_ENVIRONMENT
_DECODE_PROMPT = 480
"""Tokens of a prompt that is decoded: the 64 after it complete the second chunk of 256, which is
saved while they are decoded."""


@dataclass(frozen=True)
class RestoreCase:
    """One model and prompt length."""

    model: str
    tokens: int
    max_model_len: int


_MAIN_CASE = RestoreCase("dense-bench", 8100, 8448)
_CASES = (
    _MAIN_CASE,
    RestoreCase("dense-bench-bf16", 8100, 8448),
    RestoreCase("gemma3", 8100, 8448),
    RestoreCase("deepseek_v4", 3900, 4096),
)


@dataclass(frozen=True)
class RestoreTimes:
    """The medians of one case, in seconds, and the bytes moved."""

    case: RestoreCase
    cached_tokens: int
    dram_bytes: int
    ssd_bytes: int
    seconds: dict[str, float]

    @property
    def added_dram_s(self) -> float:
        return self.seconds["dram"] - self.seconds["local"]

    @property
    def dram_over_memcpy(self) -> float:
        return self.added_dram_s / self.seconds["memcpy"]

    @property
    def ssd_over_dd(self) -> float:
        return self.seconds["dd"] / (self.seconds["ssd"] - self.seconds["dram"])

    @property
    def ssd_over_limit(self) -> float:
        return self.seconds["limit"] / (self.seconds["ssd"] - self.seconds["dram"])


def measure_restore(case: RestoreCase, directory: Path, repeats: int) -> RestoreTimes:
    """Time cold, own prefix hit, DRAM and SSD by turns, on two prompts.

    Before a restore from SSD the state leaves DRAM, as by eviction.
    """
    samples = Samples()
    prompts = [prompt_tokens(case.tokens, seed) for seed in (1, 2)]
    extra: dict[str, Any] = {"ssd_dir": str(directory), "ssd_gib": 0.6}
    engine_args: dict[str, Any] = {"max_model_len": case.max_model_len}
    with EngineProcess(case.model, extra | {"dram_gib": 1.0}, **engine_args) as engine:
        for prompt in prompts:
            engine.wake()
            samples.add("cold", engine.complete(prompt).ttft_s)
        engine.complete(prompts[0])
        engine.reset_prefix_cache()
        engine.restored()
        engine.complete(prompts[0])
        restored_bytes = sum(engine.restored().values())
        disk = DirectDisk(directory.parent, restored_bytes)
        try:
            turns = _Turns(engine, samples, disk, Memcpy(restored_bytes))
            turns.warm(prompts, restored_bytes)
            for repeat in range(repeats):
                for number, prompt in enumerate(prompts):
                    turns.run(prompt, local_first=(repeat + number) % 2 == 0)
        finally:
            disk.close()
    shutil.rmtree(directory)
    measured = RestoreTimes(
        case, turns.cached_tokens, turns.dram_bytes, turns.ssd_bytes, samples.medians()
    )
    print(_restore_table([measured]), file=sys.stderr, flush=True)  # a long run shows its progress
    return measured


class _Turns:
    """Restores one prompt from SSD, from the engine's own cache and from DRAM, in turns."""

    def __init__(
        self, engine: EngineProcess, samples: Samples, disk: DirectDisk, memcpy: Memcpy
    ) -> None:
        self._engine, self._samples = engine, samples
        self._disk, self._memcpy = disk, memcpy
        self.cached_tokens = self.dram_bytes = self.ssd_bytes = 0

    def warm(self, prompts: list[list[int]], restored_bytes: int) -> None:
        """Touch every page of the engine's cache, which costs the first prefill extra time."""
        for turn in range(2 + _KV_CACHE_BYTES // restored_bytes if restored_bytes else 0):
            self._engine.reset_prefix_cache()
            self._engine.complete(prompts[turn % 2])
            if turn > 8:
                break
        self._engine.complete(prompts[1])

    def run(self, prompt: list[int], *, local_first: bool) -> None:
        """Time each way once. `local_first`: the engine's own hit before the restore from DRAM."""
        engine, samples = self._engine, self._samples
        engine.leave_on_ssd()
        engine.restored()
        from_ssd = self._restored(prompt)
        restored = engine.restored()
        if restored.keys() != {"ssd"}:
            raise RuntimeError(f"restored from SSD alone it should be: {restored}")
        self.ssd_bytes = restored["ssd"]
        samples.add("dd", self._memcpy.size_bytes / self._disk.read_bandwidth())
        samples.add("limit", self._memcpy.size_bytes / self._disk.limit())
        if local_first:
            local = self._timed(prompt)
            from_dram = self._restored(prompt)
        else:
            from_dram = self._restored(prompt)
            local = self._timed(prompt)
        restored = engine.restored()
        self.dram_bytes = restored.get("dram", 0)
        if restored.keys() != {"dram"}:
            raise RuntimeError(f"restored from DRAM alone it should be: {restored}")
        if not from_ssd.cached_tokens == local.cached_tokens == from_dram.cached_tokens:
            raise RuntimeError(f"unequal hits: {from_ssd=} {local=} {from_dram=}")
        self.cached_tokens = local.cached_tokens
        samples.add("memcpy", self._memcpy.reused())
        samples.add("memcpy fresh", self._memcpy.fresh())
        samples.add("local", local.ttft_s)
        samples.add("ssd", from_ssd.ttft_s)
        samples.add("dram", from_dram.ttft_s)

    def _timed(self, prompt: list[int]) -> Timing:
        self._engine.wake()
        return self._engine.complete(prompt)

    def _restored(self, prompt: list[int]) -> Timing:
        self._engine.reset_prefix_cache()
        return self._timed(prompt)


def measure_saving(directory: Path, repeats: int) -> dict[str, float]:
    """Return the ratios of a 2,048-token prefill and of 64 decoded tokens, which complete a chunk.

    The machine's speed changes within seconds, so engines take turns of about a second. A ratio is
    between turns of one round. The order of each round is drawn, so that no turn always follows the
    same other one. The turn that recomputes without saving uses the prompts of the round before,
    which its engine has stored.
    """
    samples = Samples()
    order = random.Random(0)
    engine_args: dict[str, Any] = {"max_model_len": 4608}
    ssd = {"dram_gib": 1.5, "ssd_dir": str(directory), "ssd_gib": 2.0}
    with (
        EngineProcess("dense-bench", **engine_args) as plain,
        EngineProcess("dense-bench", {"dram_gib": 1.5}, **engine_args) as saving,
        EngineProcess("dense-bench", ssd, **engine_args) as with_ssd,
    ):
        turns = [("plain", plain, False), ("save", saving, False)]
        turns += [("off", saving, True), ("spill", with_ssd, False)]
        for repeat in range(repeats + 1):
            kept = samples if repeat else Samples()
            for work in ("prefill", "decode"):
                for name, engine, recompute in order.sample(turns, len(turns)):
                    seed = max(0, repeat - recompute)
                    engine.wake()
                    if work == "prefill":
                        prompt = prompt_tokens(2048, 1000 + seed)
                        seconds = engine.complete(prompt, 1, recompute).ttft_s
                    else:
                        prompt = prompt_tokens(_DECODE_PROMPT, 2000 + seed)
                        seconds = engine.complete(prompt, 65, recompute).token_s
                    kept.add(f"{work} {name}", seconds)
                    if engine is with_ssd:
                        engine.flush()  # its writes must not run in another engine's turn
    return {
        f"{work}_{name}": samples.paired_ratio(f"{work} {what}", f"{work} {reference}")
        for work in ("prefill", "decode")
        for name, what, reference in (
            ("ratio", "save", "plain"),
            ("vs_off", "save", "off"),
            ("with_ssd", "spill", "plain"),
        )
    } | samples.medians()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restore", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument(
        "--quick", action="store_true", help="main model only, few repeats, no files"
    )
    parser.add_argument("--no-files", action="store_true", help="write nothing to results/")
    parser.add_argument("--dir", type=Path, help="directory of the SSD tier (default: .cache)")
    arguments = parser.parse_args()
    parent = arguments.dir or Path.cwd() / ".cache"
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="benchmark-", dir=parent))
    repeats = 3 if arguments.quick else 5
    try:
        possible = runnable(case.model for case in _CASES)
        cases = [case for case in _CASES if case.model in possible]
        cases = cases[:1] if arguments.quick else cases
        restores = [measure_restore(c, scratch / c.model / "ssd", repeats) for c in cases]
        saving = measure_saving(scratch / "saving", 5 if arguments.quick else 31)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    figures = _figures(restores[0], saving)
    text = _report(restores, saving, figures)
    details = {
        "restore": {r.case.model: r.seconds for r in restores},
        "saving": saving,
    }
    publish(
        "restore",
        text,
        figures,
        details,
        as_json=arguments.json,
        write=not (arguments.quick or arguments.no_files),
    )


def _figures(main_restore: RestoreTimes, saving: dict[str, float]) -> dict[str, float]:
    return rounded(
        {
            "dram_over_memcpy": main_restore.dram_over_memcpy,
            "ssd_over_dd": main_restore.ssd_over_dd,
            "prefill_save_ratio": saving["prefill_ratio"],
            "decode_ratio": saving["decode_ratio"],
            "ssd_over_limit": main_restore.ssd_over_limit,
            "prefill_save_ratio_vs_off": saving["prefill_vs_off"],
            "decode_ratio_vs_off": saving["decode_vs_off"],
            "prefill_save_ratio_with_ssd": saving["prefill_with_ssd"],
            "decode_ratio_with_ssd": saving["decode_with_ssd"],
        }
    )


def _report(
    restores: list[RestoreTimes],
    saving: dict[str, float],
    figures: dict[str, float],
) -> str:
    return "\n\n".join(
        [
            f"{machine_line()}; medians",
            _restore_table(restores),
            _saving_table(saving),
            goal_table("restore", figures),
        ]
    )


def _restore_table(restores: list[RestoreTimes]) -> str:
    columns = ("cold", "local", "dram", "ssd", "memcpy", "memcpy fresh", "dd", "limit")
    ratios = ("dram/memcpy", "ssd/dd", "ssd/limit")
    header = ["restore, ms", "tokens", "MB", *columns, "added", *ratios]
    rows = [
        [
            r.case.model,
            r.cached_tokens,
            f"{r.dram_bytes / 1e6:.1f}",
            *(f"{1e3 * r.seconds[c]:.1f}" for c in columns),
            f"{r.added_dram_s * 1e3:.1f}",
            *(
                f"{ratio:.2f}" if r.dram_bytes >= _RATIO_FROM_BYTES else "-"
                for ratio in (r.dram_over_memcpy, r.ssd_over_dd, r.ssd_over_limit)
            ),
        ]
        for r in restores
    ]
    return table(header, rows)


def _saving_table(saving: dict[str, float]) -> str:
    columns = ("plain", "off", "save", "spill")
    header = ["saving, ms", "no connector", "nothing to save", "saved", "saved, with SSD"]
    rows = [
        [work, *(f"{1e3 * saving[f'{work} {name}']:.2f}" for name in columns)]
        for work in ("prefill", "decode")
    ]
    return table(header, rows)


if __name__ == "__main__":
    main()
