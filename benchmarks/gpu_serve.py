"""`python -m benchmarks.gpu_serve [--model DIR]`: exactness and restores with vLLM on one GPU.

It runs the engine's exactness and replay tests, the benchmarks `layerwise_transfer` and `restore`,
and with `--model` a public setup: gpt-oss-120b on one H200, whose times to first token were
published for computing a prompt and for reading it from a peer.

This program itself has never run on a GPU. The tests and benchmarks that it starts were written
for vLLM's CPU build: the small checkpoints may ask a GPU's kernels for sizes that they refuse.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import Engine, EngineProcess, prompt_tokens
from benchmarks.measure import Samples, machine_line, publish, rounded, table
from examples.serving import kv_transfer_config

ROOT = Path(__file__).parents[1]
PASSED, FAILED, NOTHING_TO_CHECK_ON = 0, 1, 3
STEPS: Mapping[str, Sequence[str]] = {
    "exactness": ("pytest", "-q", "tests/engine/test_exactness.py", "tests/engine/test_replay.py"),
    "layerwise": ("benchmarks.layerwise_transfer", "--json", "--no-files"),
    "restore": ("benchmarks.restore", "--json", "--no-files"),
}
"""Modules that are run, with their arguments."""
PUBLIC = "public"
PUBLISHED_MS = {
    2048: (71, 49),
    8192: (205, 120),
    16384: (426, 196),
    32768: (983, 376),
    49152: (1695, 551),
}
"""Tokens of a prompt: milliseconds to compute it, and to read it from a peer. llm-d's guide,
gpt-oss-120b MXFP4, one H200, blocks of 64 tokens."""
_STEP_TIMEOUT_S = 3600.0
_REPEATS = 5


class PublicEngine(Engine):
    """The engine of the public setup."""

    def __init__(
        self, model: str, extra: Mapping[str, Any] | None, engine_args: Mapping[str, Any]
    ) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=model,
            max_model_len=65536,
            block_size=64,
            gpu_memory_utilization=0.85,
            disable_log_stats=False,
            kv_transfer_config=kv_transfer_config(extra),
            **engine_args,
        )
        self._counted = {}


def run_step(name: str) -> tuple[bool, dict[str, float], str]:
    """Run a step; return whether it ended well, its figures and the last line it printed."""
    module, *arguments = STEPS[name]
    command = [sys.executable, "-m", module, *arguments]
    print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_STEP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False, {}, f"no end after {_STEP_TIMEOUT_S:.0f} s"
    lines = done.stdout.strip().splitlines() or ["printed nothing"]
    if done.returncode:
        return False, {}, lines[-1]
    if "--json" not in arguments:
        return True, {}, lines[-1]
    figures = {f"{name}_{key}": value for key, value in json.loads(lines[-1]).items()}
    return True, figures, f"{len(figures)} figures"


def measure_public(
    model: str,
    dram_gib: float,
    lengths: Sequence[int],
    start: Callable[..., EngineProcess] = EngineProcess,
) -> Samples:
    """Return times to first token: computed, restored from DRAM, and the engine's own hit."""
    samples = Samples()
    extra = {"dram_gib": dram_gib, "planner": "always_load", "prefetch": "off"}
    with start(model, extra, kind=PublicEngine) as engine:
        for length in lengths:
            for repeat in range(_REPEATS + 1):
                prompt = prompt_tokens(length, seed=length + repeat)
                computed = engine.complete(prompt, recompute=True)
                engine.complete(prompt)
                engine.reset_prefix_cache()
                engine.restored()
                restored = engine.complete(prompt)
                tiers = engine.restored().keys()
                if tiers != {"dram"}:
                    raise RuntimeError(f"{length} tokens were restored from {set(tiers) or 'none'}")
                local = engine.complete(prompt)
                if repeat:  # the first one of a length compiles and captures
                    samples.add(f"computed_{length}", computed.ttft_s)
                    samples.add(f"dram_{length}", restored.ttft_s)
                    samples.add(f"local_{length}", local.ttft_s)
    return samples


def public_report(samples: Samples, lengths: Sequence[int]) -> tuple[str, dict[str, float]]:
    """Return a table with the published times, and the figures."""
    medians = {name: 1e3 * seconds for name, seconds in samples.medians().items()}
    rows = []
    for length in lengths:
        ours = [f"{medians[f'{kind}_{length}']:.0f}" for kind in ("computed", "dram", "local")]
        rows.append([f"{length} tokens, ms", *ours, *PUBLISHED_MS.get(length, ("", ""))])
    header = ["gpt-oss-120b", "computed", "DRAM", "own hit", "published: computed", "peer"]
    return table(header, rows), {f"public_{name}_ms": value for name, value in medians.items()}


def missing() -> str | None:
    """Return what is missing, in a line; None if nothing is."""
    for name in ("torch", "vllm", "pytest"):
        if importlib.util.find_spec(name) is None:
            return f"not installed: {name}"
    import torch

    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds none"
    return None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", choices=[*STEPS, PUBLIC], help="this step; may be repeated"
    )
    parser.add_argument("--model", help="a local copy of gpt-oss-120b, for the public setup")
    parser.add_argument("--dram-gib", type=float, default=88.0, help="its DRAM tier (default 88)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(PUBLISHED_MS),
        help="tokens of its prompts (default: those with published times)",
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--no-files", action="store_true", help="write nothing to results/")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; return 0 if none failed, 1 if one did, 3 if something is missing."""
    arguments = build_parser().parse_args(argv)
    lacking = missing()
    if lacking:
        print(f"gpu_serve: {lacking}", file=sys.stderr)
        return NOTHING_TO_CHECK_ON
    figures: dict[str, float] = {}
    lines, tables, failed = [], [], False
    for name in arguments.only or [*STEPS, PUBLIC]:
        started = time.perf_counter()
        if name in STEPS:
            passed, found, said = run_step(name)
            verdict = "PASS" if passed else "FAIL"
            failed |= not passed
        elif arguments.model is None:
            found, said, verdict = {}, "give --model", "NOT RUN"
        else:
            try:
                samples = measure_public(arguments.model, arguments.dram_gib, arguments.lengths)
            except Exception as error:  # the other steps took hours
                found, said, verdict, failed = {}, repr(error), "FAIL", True
            else:
                text, found = public_report(samples, arguments.lengths)
                tables.append(text)
                said, verdict = f"{len(arguments.lengths)} lengths", "PASS"
        figures |= found
        lines.append(f"{verdict:8}{name:12}{time.perf_counter() - started:5.0f} s  {said}")
    text = "\n\n".join([f"gpu_serve: {gpu_name()}\n{machine_line()}", *tables, "\n".join(lines)])
    details = {"gpu": gpu_name(), "steps": lines}
    publish(
        "gpu_serve",
        text,
        rounded(figures),
        details,
        as_json=arguments.json,
        write=not arguments.no_files,
    )
    return FAILED if failed else PASSED


def gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_properties(0).name)


if __name__ == "__main__":
    sys.exit(main())
