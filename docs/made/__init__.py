"""The parts of `docs/generate.py`: what all of them need is here.

`figures`: tables of benchmark results. `fleets`: those of simulated fleets. `reference`: pages of
keys, metrics, commands, errors and request parameters. `migration`: compatibility, and the way from
other connectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTE = "<!-- Made by docs/generate.py. Do not edit. -->\n\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
