"""`heterocache explain`: shows what the planner would restore of a prompt, and why.

It reads one model's journal, so all state is assumed to be on SSD (or all in DRAM, with
`in_dram`), and the engine is assumed to be idle: the DRAM and load of a running engine are not
known here. The journal's last engine recorded its settings, and whether windows can be rebuilt by
a replay. Costs come from a profile, else from what that engine learned, if it ran on this machine,
else they are the defaults that an engine starts with. The answer lists these assumptions.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hetero_connector import machine
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.extra_keys import text_keys
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.artifacts.tails import chunk_beyond, longest_tail
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.learned import read_learned
from hetero_connector.errors import ConfigError, StoreError
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import EngineSettings, RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec import ModelSpec
from hetero_connector.store.catalog.index import PrefixIndex
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import REPLAY_EXACT, WINDOW_REPLAY
from hetero_connector.store.ssd.space import JOURNAL_NAME, LEARNED_NAME
from hetero_connector.tools.inspection import generation_of

_Value = TypeVar("_Value")
_WIDTH = 80


@dataclass(frozen=True)
class Explanation:
    """A decision, and the assumptions it was made on."""

    decision: RestoreDecision
    settings: EngineSettings
    settings_from: str
    costs_from: str
    tier: Tier
    """The tier in which all state was assumed to be."""

    def assumptions(self) -> str:
        """Return the assumptions as two paragraphs of text."""
        place = "in DRAM" if self.tier is Tier.DRAM else "on SSD"
        assumed = f"Assumed: all state {place}, an idle engine, {self.settings}"
        assumed += f" ({self.settings_from})."
        paragraphs = (assumed, f"Costs: {self.costs_from}.")
        wrapper = textwrap.TextWrapper(_WIDTH, break_on_hyphens=False, break_long_words=False)
        return "\n".join(map(wrapper.fill, paragraphs))

    def as_json(self) -> dict[str, Any]:
        """Return the output of `--json`."""
        assumed = asdict(self.settings) | {
            "settings_from": self.settings_from,
            "costs_from": self.costs_from,
            "tier": self.tier.value,
        }
        return as_json(self.decision) | {"assumed": assumed}


def decide(
    directory: Path, token_ids: list[int], profile: Path | None, *, in_dram: bool
) -> Explanation:
    """Let the planner decide for a request of `token_ids` on an idle engine.

    `directory`: one model's directory. `profile`: the file of a `CostProfile`. Raises StoreError,
    also for a bad profile or that of another model, and ValueError for a bad token id.
    """
    tier = Tier.DRAM if in_dram else Tier.SSD
    journal = Journal.open_copy(directory / JOURNAL_NAME)
    try:
        description, fingerprint = journal.meta.description, journal.meta.fingerprint
        layout = _described(directory, _layout, description)
        index = _index(journal, tier, layout.chunk_tokens)
    finally:
        journal.close()
    known = len(token_ids)
    # Named as its last engine would: rows from before a reset or a clearing are not found.
    chain = RequestChain(
        ChainHasher(fingerprint, layout.chunk_tokens, generation_of(directory).tag),
        text_keys(None, Clearings.in_folder(directory)),
    )
    chain.extend(token_ids)
    stored = index.match(chain.chunks(known - 1))
    last = stored[-1].chunk if stored else None
    tail = longest_tail(index, chain, last, known - 1)
    if max((x.chunk.end for x in tail or stored), default=0) < layout.model.last_cut(known - 1):
        tail = chunk_beyond(index, chain, last, known - 1) or tail
    stored += tail
    recorded = _described(directory, EngineSettings.of, description)
    settings = recorded or EngineSettings()
    known_costs, costs_from = _costs(directory, profile, description)
    types, step_tokens = layout.model.state_types, settings.step_tokens
    if known_costs is None:
        costs = CostModel(ComputeRegression(), LoadModel(types), step_tokens=step_tokens)
    else:
        costs = known_costs.cost_model(types, step_tokens=step_tokens)
    planner = RestorePlanner(
        layout,
        costs,
        settings.planner,
        replay_tokens=_replay_tokens(layout.model, description),
        deadline_s=settings.load_deadline_s,
    )
    load = EngineLoad(hidden_share=float(settings.layerwise), parking=settings.parking)
    return Explanation(
        planner.plan(stored, 0, known - 1, known, load),
        settings,
        "recorded by its last engine" if recorded else "defaults: its last engine recorded none",
        costs_from,
        tier,
    )


def _costs(
    directory: Path, profile: Path | None, description: Mapping[str, Any]
) -> tuple[CostProfile | None, str]:
    """Return the costs to decide with, None for the built-in ones, and their source in words.

    Raises StoreError for a bad `profile`, or one of another model.
    """
    guess = "a guess, the same for every model: name measured ones with --profile"
    if profile is not None:
        subject = _described(directory, ProfileSubject.of, description)
        try:
            found = CostProfile.read(profile, subject)
        except ConfigError as error:  # names a key of an engine
            problem = str(error).partition(": ")[2]
            raise StoreError(f"--profile: {problem}") from error
        return found, f"{found.origin}, from {profile}"
    path = directory / LEARNED_NAME
    try:
        subject = ProfileSubject.of(description)
        learned = read_learned(path, subject)
        if learned is None:
            return None, f"{guess}, or let an engine of this version learn them here"
        if not machine.is_this_one(learned.subject.machine):
            raise ValueError(f"it was {learned.origin}, which is not this machine")
    except KeyError:
        return None, guess
    except ValueError as error:
        return None, f"{guess}. {path} is not used: {error}"
    return learned, learned.origin


def read_tokens(path: Path, tokenizer_of: Callable[[], Any]) -> list[int]:
    """Read token ids from a file: a JSON list of them, else text for the model's tokenizer.

    Raises StoreError if the file cannot be read, has no token, or is another JSON list or object.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    ids = _list_or_object(text)
    if ids is None:
        ids = tokenizer_of().encode(text)
    if not ids or not all(type(x) is int for x in ids):
        raise StoreError(f"{path} holds neither a JSON list of token ids nor text")
    return list(ids)


def _list_or_object(text: str) -> Any:
    """Parse a JSON list or object; None for anything else, which counts as text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list | dict) else None


def tokenizer(directory: Path) -> Any:
    """Load the tokenizer of the directory's model. Raises StoreError."""
    journal = Journal.open_copy(directory / JOURNAL_NAME)
    name = str(journal.meta.description.get("model_name", ""))
    journal.close()
    return load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model, a path or repository. Raises StoreError."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        raise StoreError(f"no tokenizer of {name!r}: {error}; pass token ids instead") from error


def as_json(decision: RestoreDecision) -> dict[str, Any]:
    """Return a decision for `--json`."""
    plan = decision.plan
    return {
        "boundary": plan.boundary if plan else 0,
        "predicted": decision.predicted._asdict(),
        "nothing": decision.nothing._asdict(),
        "reuse_benefit_s": decision.reuse_benefit_s,
        "candidates": [
            {
                "boundary": c.boundary,
                "resume_tokens": c.resume_tokens,
                "load_bytes": {tier.value: size for tier, size in c.load_bytes.items()},
                "terms": c.terms._asdict(),
                "total_s": c.terms.total_s,
                "in_time": c.in_time,
                "chosen": c.chosen,
            }
            for c in decision.candidates()
        ],
    }


def _layout(description: Mapping[str, Any]) -> ArtifactLayout:
    model = ModelSpec.from_plain(description["model_spec"])
    return ArtifactLayout(model, int(description["chunk_tokens"]))


def _described(
    directory: Path, read: Callable[[Mapping[str, Any]], _Value], description: Mapping[str, Any]
) -> _Value:
    try:
        return read(description)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StoreError(
            f"{directory} does not describe its model and engine: an earlier version wrote it. "
            "Start an engine of this version on it once"
        ) from error


def _replay_tokens(model: ModelSpec, description: Mapping[str, Any]) -> int:
    """Return 0 unless the journal's engine recorded that a replay is exact there."""
    if description.get(WINDOW_REPLAY) != REPLAY_EXACT:
        return 0
    return WindowReplay.of(model).tokens


def _index(journal: Journal, tier: Tier, full_chunk: int) -> PrefixIndex:
    index = PrefixIndex(full_chunk, offer=lambda artifact: None)
    for row in journal.load():
        node = index.nodes.get(row.chunk.key)
        known = node is not None and row.state_type in node.artifacts
        if row.chunk.parent in index.nodes and not known:
            artifact = index.add(row.chunk, row.state_type, row.size_bytes)
            index.attach(artifact, SlotRef(tier, row.state_type, row.slot, row.generation), 0)
            index.seal(artifact)
    return index
