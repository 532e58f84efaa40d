"""Units of bytes, and sizes as people read them."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def size_text(num_bytes: float) -> str:
    """Return a size in the largest unit that it fills, e.g. `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
