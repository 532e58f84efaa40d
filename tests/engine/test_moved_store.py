"""An engine that is started on an imported store restores from it at once, and exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_connector.tools import cli
from tests.engine.harness import (
    delta,
    engine,
    generate,
    metric,
    prompt_tokens,
    settle,
)

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1400, seed=77)


def test_an_engine_starts_warm_on_an_imported_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there, prompt = tmp_path / "here", tmp_path / "there", tmp_path / "prompt.json"
    prompt.write_text(json.dumps(PROMPT))
    extra = {"dram_gib": 0.1, "ssd_gib": 0.2}
    arguments = {"max_num_batched_tokens": 512, "disable_log_stats": False}
    with engine("gemma3", {**extra, "ssd_dir": str(here)}, **arguments) as llm:
        for n in range(3):  # so that it learns what steps cost
            generate(llm, prompt_tokens(1400, seed=n), max_tokens=8)
        generate(llm, PROMPT)
        settle(llm)
        assert cli.main(["export", str(here), str(tmp_path / "live")]) == 0
        reference = generate(llm, PROMPT, max_tokens=8)
    assert cli.main(["export", str(here), str(tmp_path / "exported")]) == 0
    assert cli.main(["import", str(tmp_path / "exported"), str(there), "--ssd-gib", "0.2"]) == 0
    assert cli.main(["import", str(tmp_path / "live"), str(there)]) == 0
    assert "0 artifacts imported" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["explain", str(there), str(prompt)]) == 0
    explained = capsys.readouterr().out
    assert "tokens from SSD" in explained
    assert "Costs: learned on " in explained
    with engine("gemma3", {**extra, "ssd_dir": str(there)}, **arguments) as llm:
        before = metric("heterocache_hit_tokens_total", tier="ssd")
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == reference.num_cached_tokens > 1024
        hits = metric("heterocache_hit_tokens_total", tier="ssd") - before
        assert hits == restored.num_cached_tokens
        assert delta(restored, reference) == 0.0
