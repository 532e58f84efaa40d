"""`python -m benchmarks.side_by_side.shared_prefixes [--json]`: prefixes that sessions share.

Sessions with a common prefix hit it in the engine's own cache. After a restart all is restored, and
they must share what was restored as they shared what was computed. Both are counted, not timed:

- `local_hits`: tokens hit in the engine's own cache after the restart, over those before it. Worst
  model.
- `blocks_per_session`: blocks with state in HBM after all sessions, after the restart over before
  it. Worst model.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accounts import registered
from benchmarks.engine_process import Engine, EngineProcess, prompt_tokens
from benchmarks.goals import goal_table
from benchmarks.measure import machine_line, publish, rounded, table
from benchmarks.side_by_side.environments import ROOT
from examples.cpu_kernels import runnable
from examples.serving import stop_servers_on_sigterm

MODELS = ("dense", "gemma3", "gptoss", "llama4", "deepseek_v4", "qwen3_next")
_PREFIXES = 2
_PREFIX_TOKENS = 1500
_SESSIONS = 4
"""The sessions of each prefix."""
_OWN_TOKENS = 600


class _Counting(Engine):
    """An engine that counts what its sessions share."""

    def hits(self, prompt: list[int]) -> tuple[int, int]:
        """Complete a prompt; return its tokens hit in the engine's own cache and those restored."""
        before = _restored_tokens()
        cached = self.complete(prompt, 1, False).cached_tokens
        restored = _restored_tokens() - before
        return cached - restored, restored

    def blocks(self) -> int:
        """Return the number of blocks that the engine's own cache has."""
        core = self._llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        return sum(block.block_hash is not None for block in pool.blocks)


def _restored_tokens() -> int:
    return int(
        sum(n for (name, _, _), n in registered().items() if name == "heterocache_hit_tokens")
    )


@dataclass(frozen=True)
class Sharing:
    """The counts of all sessions in one engine."""

    local_tokens: int
    restored_tokens: int
    blocks: int


@dataclass(frozen=True)
class Restart:
    """The same sessions with one model before and after a restart."""

    model: str
    computed: Sharing
    restored: Sharing

    @property
    def local_hits(self) -> float:
        """Tokens hit in the engine's own cache, after over before; 1 where there were none."""
        before = self.computed.local_tokens
        return self.restored.local_tokens / before if before else 1.0

    @property
    def blocks_per_session(self) -> float:
        """Blocks of the engine's own cache, after over before."""
        return self.restored.blocks / self.computed.blocks


def sessions() -> list[list[int]]:
    """Return the prompts, by turns of the prefixes."""
    prefixes = [prompt_tokens(_PREFIX_TOKENS, 10 + i) for i in range(_PREFIXES)]
    return [
        prefixes[i % _PREFIXES] + prompt_tokens(_OWN_TOKENS, 100 + i)
        for i in range(_PREFIXES * _SESSIONS)
    ]


def measure(model: str, folder: Path) -> Restart:
    """Compute all sessions; start again; ask for them again."""
    extra = {"dram_gib": 0.5, "ssd_dir": str(folder), "ssd_gib": 0.5}
    passes = []
    for _ in range(2):
        with EngineProcess(model, extra, kind=_Counting) as engine:
            hits = [engine.call("hits", prompt) for prompt in sessions()]
            local, restored = (sum(column) for column in zip(*hits, strict=True))
            passes.append(Sharing(local, restored, engine.call("blocks")))
            engine.flush()
    return Restart(model, *passes)


def report(restarts: list[Restart]) -> str:
    """Return the table."""
    head = ["sessions that share prefixes", "local hits, computed", "restored", "ratio"]
    head += ["tokens restored", "blocks, computed", "restored", "ratio"]
    rows = [
        [
            x.model,
            f"{x.computed.local_tokens:,}",
            f"{x.restored.local_tokens:,}",
            f"{x.local_hits:.2f}",
            f"{x.restored.restored_tokens:,}",
            f"{x.computed.blocks:,}",
            f"{x.restored.blocks:,}",
            f"{x.blocks_per_session:.2f}",
        ]
        for x in restarts
    ]
    return table(head, rows)


def figures(restarts: list[Restart]) -> dict[str, float]:
    """Return the figures of the worst model."""
    return rounded(
        {
            "local_hits": min(x.local_hits for x in restarts),
            "blocks_per_session": max(x.blocks_per_session for x in restarts),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side.shared_prefixes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    given = parser.parse_args()
    stop_servers_on_sigterm()
    ROOT.mkdir(parents=True, exist_ok=True)
    restarts = []
    for model in runnable(given.models):
        folder = Path(tempfile.mkdtemp(prefix="shared-", dir=ROOT))
        try:
            restarts.append(measure(model, folder / "ssd"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(report(restarts[-1:]), flush=True)
    print()
    found = figures(restarts)
    goals = goal_table("shared_prefixes", found)
    publish(
        "shared_prefixes",
        f"{machine_line()}\n\n{report(restarts)}\n\n{goals}",
        found,
        {"models": [asdict(x) for x in restarts]},
        as_json=given.json,
        write=set(given.models) == set(MODELS),
    )


if __name__ == "__main__":
    main()
