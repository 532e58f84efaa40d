"""Small checkpoints with random but well-scaled weights, one per attention type.

`load_format=dummy` weights give nearly constant logits, so a test on them proves
nothing. These outputs depend on far context: flipping an early prompt token moves the
last logprobs (`tests/engine/test_power.py` measures it). Everything is seeded.

`recipes` holds the models that `transformers` can build, `deepseek_v4` the one it is
not asked to, `blip2` the one that sees images, `tokenizer` the byte-level tokenizer they
share. To add a model, add a recipe.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from examples.checkpoints.blip2 import IMAGE_TOKEN, write_blip2
from examples.checkpoints.deepseek_v4 import write_deepseek_v4
from examples.checkpoints.recipes import RECIPES, write_recipe
from examples.checkpoints.tokenizer import write_tokenizer

__all__ = ["NAMES", "write_checkpoint"]

_REVISION = 2
"""Raise it when a recipe changes: checkpoints already written are made again."""
_STAMP = "checkpoint.json"

_WRITERS: dict[str, Callable[[Path], None]] = {
    "deepseek_v4": write_deepseek_v4,
    "blip2": write_blip2,
    **{name: partial(write_recipe, recipe) for name, recipe in RECIPES.items()},
}

NAMES = tuple(sorted(_WRITERS))
"""Every checkpoint this package can write."""


def write_checkpoint(name: str, root: Path | str) -> Path:
    """Write checkpoint `name` to `root/name` unless it is there; return the directory.

    It is written aside and renamed, so a directory of that name is always complete and
    two processes may ask for the same one at the same time.

    Raises `KeyError`, naming the ones there are, for a name that is unknown.
    """
    if name not in _WRITERS:
        raise KeyError(f"no checkpoint {name!r}; there are {', '.join(NAMES)}")
    root = Path(root)
    directory = root / name
    if _is_current(directory):
        return directory
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        _WRITERS[name](aside)
        write_tokenizer(aside, [IMAGE_TOKEN] if name == "blip2" else [])
        (aside / _STAMP).write_text(json.dumps({"name": name, "revision": _REVISION}) + "\n")
        aside.chmod(0o755)
        if directory.exists() and not _is_current(directory):
            shutil.rmtree(directory)
        try:
            os.rename(aside, directory)
        except OSError:
            if not _is_current(directory):  # else another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _is_current(directory: Path) -> bool:
    try:
        stamp = json.loads((directory / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp.get("revision") == _REVISION)
