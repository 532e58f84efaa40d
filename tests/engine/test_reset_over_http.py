"""`POST /reset_prefix_cache?reset_external=true` on the stock server, and kill -9 after it."""

from __future__ import annotations

import json
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from hetero_connector.artifacts.generation import FIRST, Generation
from hetero_connector.store.ssd.generation_file import GENERATION_NAME, read_generation
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.space import JOURNAL_NAME
from tests.engine.harness import CHECKPOINTS, prompt_tokens
from tests.engine.process_group import assert_gone
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # three server starts

MODEL = "dense"
PROMPTS = [prompt_tokens(700, seed=90 + rank) for rank in range(2)]
TIERS = {"dram_gib": 0.02, "ssd_gib": 0.2, "checkpoints": "full", "planner": "always_load"}


class Engines(Server):
    """A server with one or several engines."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(
            write_checkpoint(MODEL, CHECKPOINTS),
            folder / "server.log",
            kv_transfer_config({**TIERS, "ssd_dir": str(folder / "ssd")}),
            {"data_parallel_size": count} if count > 1 else {},
        )
        self.count = count
        self.ssd = folder / "ssd"

    def cached_tokens(self) -> list[int]:
        """Return the cached tokens of each engine's own prompt."""
        return [self._cached_tokens(rank) for rank in range(self.count)]

    def _cached_tokens(self, rank: int) -> int:
        body = {"model": MODEL, "prompt": PROMPTS[rank], "max_tokens": 1, "temperature": 0.0}
        headers = {"Content-Type": "application/json"}
        if self.count > 1:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            details = json.load(response)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0

    def reset(self, *, external: bool) -> bool:
        query = "?reset_external=true" if external else ""
        return bool(self.post(f"/reset_prefix_cache{query}", {})["success"])

    def wait_until_stored(self) -> None:
        """Wait until every engine has written to its SSD: its end may lose the last saves."""
        for path in sorted(self.ssd.rglob(JOURNAL_NAME)):
            until(partial(self._rows, path), f"something is in {path}", pause_s=0.1)

    def _rows(self, path: Path) -> int:
        journal = Journal.open_copy(path, check=False)
        rows = len(list(journal.load()))
        journal.close()
        return rows

    def generations(self) -> list[Generation]:
        """Return each engine's generation, as the next process would find it."""
        return [read_generation(file) for file in sorted(self.ssd.rglob(GENERATION_NAME))]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_state_from_before_a_reset_is_not_served_after_a_kill(tmp_path: Path, count: int) -> None:
    nothing = [0] * count
    with Engines(tmp_path, count) as server:
        assert server.cached_tokens() == nothing
        assert server.reset(external=False)
        assert all(server.cached_tokens()), "the store has it"
        assert server.generations() == [FIRST] * count
        server.wait_until_stored()
    with Engines(tmp_path, count) as server:
        assert all(server.cached_tokens()), "it outlives the server"
        assert server.reset(external=True)
        kept = server.generations()
        assert len({FIRST, *kept}) == 1 + count, "each engine has a generation of its own"
        group = server.group
        server.kill()
        assert_gone(group)
    with Engines(tmp_path, count) as server:
        assert server.cached_tokens() == nothing
        assert server.reset(external=False)
        assert all(server.cached_tokens()), "it stores again"
        assert server.generations() == kept
        server.post("/sleep?level=1", {})
        server.post("/wake_up", {})
        assert server.cached_tokens() == nothing
        assert not set(kept) & set(server.generations()), "to sleep is to be reset"
