"""The files that engines keep next to a journal: what was learned, and what was cleared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.learned import read_learned
from hetero_connector.errors import StoreError
from hetero_connector.planner.profile import ProfileSubject
from hetero_connector.store.ssd.space import LEARNED_NAME


@dataclass(frozen=True)
class SideFiles:
    """The content of the files."""

    costs: str | None
    """The source of the learned costs in words; None without any that can be used."""
    costs_problem: str | None
    """Why they cannot be used: no engine would, and it learns anew."""
    cleared_salts: int
    """Salts and models of which everything was cleared."""
    salts_problem: str | None
    """Why that is unknown: no engine starts here until it is mended."""

    @property
    def problems(self) -> list[str]:
        """Return why files cannot be used."""
        return [x for x in (self.costs_problem, self.salts_problem) if x is not None]


def read_side_files(path: Path, description: Mapping[str, Any]) -> SideFiles:
    """Read the files of a model's directory. `description`: of its journal."""
    costs = costs_problem = salts_problem = None
    cleared = 0
    if (subject := _subject(description)) is not None:
        try:
            learned = read_learned(path / LEARNED_NAME, subject)
            costs = None if learned is None else learned.origin
        except ValueError as e:
            costs_problem = f"{LEARNED_NAME} is not used: {e}"
    try:
        cleared = len(Clearings.in_folder(path).counts)
    except StoreError as e:
        salts_problem = str(e)
    return SideFiles(costs, costs_problem, cleared, salts_problem)


def _subject(description: Mapping[str, Any]) -> ProfileSubject | None:
    """Return the model; None for a description of an earlier version, or that no engine wrote."""
    try:
        return ProfileSubject.of(description)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
