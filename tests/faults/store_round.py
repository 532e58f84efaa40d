"""A life in which a store is used by its own calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Save, StoreConfig
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, PrefetchCosts
from hetero_connector.store.catalog.restore import Restore
from tests.faults.journals import connector
from tests.faults.life import SETTLING_STEPS, Action, Life
from tests.faults.slabs import FaultyFiles
from tests.store.filling import CHUNK, CHUNK_BYTES, FINGERPRINT, SIZES, begin, chain, ids_of
from tests.store.under_way import snapshot

DEPTH = 4
TRIES = 5
_NAMES = "abcdef"


class StoreRound(Life):
    """Saves, restores and resets of a store. See `Life`."""

    def __init__(self, seed: int, threaded: bool) -> None:
        super().__init__(seed, threaded, SIZES, CHUNK_BYTES)
        self._saves: list[Save] = []
        self._restores: list[tuple[Restore, int]] = []
        self._chains: dict[bytes, dict[str, list[ChunkRange]]] = {}

    def _actions(self) -> list[tuple[Action, int]]:
        return [
            (self._save, 8),
            (self._end_save, 4),
            (self._restore, 8),
            (self._release, 5),
            (self._touch, 1),
            (self._expect, 2),
            (self._decline, 1),
            (self._reset, 2),
        ]

    def _open(self, config: StoreConfig) -> ArtifactStore:
        return ArtifactStore.open(
            SIZES,
            config,
            self._recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            clock=self._clock,
            open_transfer=partial(FaultyFiles, self._disk),
            connect=connector(self._disk),
            run_io=self._threaded,
            prefetch_costs=PrefetchCosts(used_within=lambda idle_s, within_s: 0.9),
        )

    def _forget_process(self) -> None:
        for restore, _ in self._restores:
            restore.release()
        self._restores.clear()
        self._saves.clear()

    def _end_work(self) -> None:
        for save in list(self._saves):
            self._complete(save)
        for restore, _ in self._restores:
            restore.release()
        self._restores.clear()

    @property
    def _trunks(self) -> dict[str, list[ChunkRange]]:
        """The chains there are in the store's generation; two of them begin alike."""
        tag = self._store.generation.tag
        if tag not in self._chains:
            trunks = {name: chain(f"{tag.hex()}{name}", DEPTH) for name in _NAMES}
            trunks["b2"] = [*trunks["b"][:2], *chain("b2", DEPTH - 2, trunks["b"][1])]
            self._chains[tag] = trunks
        return self._chains[tag]

    def _save(self) -> None:
        """Compute the next chunks of a chain; some are sealed later, or never."""
        store, rng = self._store, self._rng
        trunk = self._trunks[rng.choice(list(self._trunks))]
        for chunk in trunk[len(store.match(trunk)) :][: rng.randint(1, 3)]:
            missing = store.missing(chunk, list(SIZES))
            save = store.begin_save(chunk, {t: SIZES[t] for t in missing}) if missing else None
            if save is None:
                return
            self._saves.append(save)
            if rng.random() < 0.1:
                return
            self._complete(save)

    def _complete(self, save: Save) -> None:
        self._saves.remove(save)
        for kind, offset in save.offsets.items():
            size = save.sizes[kind]
            content = self._oracle.contents(ArtifactId(save.chunk.key, kind))
            self._store.arena.view[offset : offset + size] = content
        self._store.complete_save(save)

    def _end_save(self) -> None:
        if self._saves:
            save = self._rng.choice(self._saves)
            if self._rng.random() < 0.7:
                self._complete(save)
            else:
                self._saves.remove(save)
                self._store.abandon_save(save)

    def _restore(self) -> None:
        matches = [found for trunk in self._trunks.values() if (found := self._store.match(trunk))]
        if not matches:
            return
        if self._rng.random() < 0.3:
            self._store.leave_to_ssd()
        found = self._rng.choice(matches)[: self._rng.randint(1, DEPTH)]
        wanted = [i for x in found for i in ids_of([x.chunk], x.tiers)]
        self._restores.append((begin(self._store, wanted), self._oracle.weights))
        if len(self._restores) > 2:
            self._release()

    def _release(self) -> None:
        if self._restores:
            at = self._rng.randrange(len(self._restores))
            self._restores.pop(at)[0].release()

    def _touch(self) -> None:
        if not self._threaded:
            assert self._store.io_thread is not None
            self._store.io_thread.housekeep()

    def _expect(self) -> None:
        name = self._rng.choice(list(self._trunks))
        leaves: tuple[ChunkKey, ...] = tuple(c.key for c in reversed(self._trunks[name]))
        now_s = self._clock()
        self._store.expect(ExpectedReturn(name, leaves, now_s, now_s + 100.0, 0.5))

    def _decline(self) -> None:
        self._store.decline(self._store.match(self._trunks[self._rng.choice(_NAMES)])[1:])

    def _reset(self) -> None:
        before, trunks = self._store.generation.tag, self._trunks
        is_kept = self._store.reset()
        if self._disk.is_off:
            return  # nobody has heard the answer
        self._oracle.on_reset(before, is_kept=is_kept)
        left = [name for name, trunk in trunks.items() if self._store.match(trunk)]
        if left:
            self.verdict.wrong_answers.append(f"after a reset there still is {left}")

    def _serves_again(self) -> None:
        fresh = chain(f"fresh{self._boots}", 1)
        save = self._store.begin_save(fresh[0], SIZES)
        if save is None:
            self.verdict.stuck.append("a new chunk finds no room in DRAM")
            return
        self._saves.append(save)
        self._complete(save)
        self._is_restored(fresh, "a new chunk")
        for _ in range(SETTLING_STEPS):
            now = snapshot(self._store.catalog)
            if not (now.writes_queued or now.writing):
                break
            self._pass(1.0)
        self._store.leave_to_ssd()
        if self._store.catalog.ssd_readable:
            self._is_restored(fresh, "a new chunk that has left DRAM")

    def _is_restored(self, chunks: Sequence[ChunkRange], what: str) -> None:
        """Restore them; a busy machine may take longer than a deadline by a fast clock."""
        for _ in range(TRIES):
            restore = begin(self._store, ids_of(chunks))
            for _ in range(SETTLING_STEPS):
                if restore.poll():
                    break
                self._pass(0.1)
            if restore.poll() and not restore.failed:
                self._restores.append((restore, self._oracle.weights))
                self._judge()
                self._restores.pop()[0].release()
                return
            restore.release()
        self.verdict.stuck.append(f"{what} is not restored: {restore.failed}")

    def _judge_answers(self) -> None:
        for restore, weights in self._restores:
            assert restore.poll() in (True, False)
            for wrong in self._oracle.judge(self._store, restore, weights):
                self._wrong(wrong)
