"""What the documents promise is tested where they say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def failures() -> list[list[str]]:
    """The cells of each row of the table of failures."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## Failures")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def test_every_failure_in_the_table_has_a_test() -> None:
    rows = failures()
    assert len(rows) > 30
    for what, *_, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert named, f"no test is named for: {what}"
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"{file} has no {test}, named for: {what}"
