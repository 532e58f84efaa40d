"""Hand-made trace files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: Iterable[Any], *, zipped: bool = False) -> Path:
    """One JSON value a line; a string is written as it is."""
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def call(t: float, tokens: int, runs: list[list[int]], **more: Any) -> dict[str, Any]:
    """A request of a coding-agent session."""
    return {"t": t, "type": "n", "in": tokens, "out": 10, "runs": runs, **more}


def agent_session(name: str, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A coding-agent session of 64-token blocks."""
    return {"id": name, "block_size": 64, "requests": requests, **more}
