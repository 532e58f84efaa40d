"""Everything of vLLM that the package imports, calls, reads or overrides has those types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = "tests/vllm_types/mypy.toml"
MISTAKES = "tests/vllm_types/mistakes.py"


@pytest.mark.long
def test_the_package_agrees_with_the_types_of_this_vllm() -> None:
    """mypy reads the vLLM on `MYPYPATH` (see `scripts/with_vllm.py`), or else the installed one."""
    mypy = [sys.executable, "-m", "mypy", "--config-file", CONFIG, "--no-pretty"]
    cache = os.environ.get("MYPYPATH", "installed").replace("/", "_")
    done = subprocess.run(
        [*mypy, "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache" / cache)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    found = set(re.findall(r"(?m)^(\S+?:\d+): error: .*$", done.stdout))
    lines = (ROOT / MISTAKES).read_text().splitlines()
    wrong = {f"{MISTAKES}:{n}" for n, line in enumerate(lines, 1) if line.endswith("# mistake")}
    assert found == wrong, done.stdout
