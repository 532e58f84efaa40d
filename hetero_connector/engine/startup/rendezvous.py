"""Exchange the workers' geometry and the arena's name through small files, before any request.

vLLM builds the workers, with their KV caches, before the scheduler, and gives the scheduler only a
reduced copy of their geometry. So each worker writes its own geometry to a file that is named after
the engine and its process, and the scheduler side reads them. In the other direction it publishes
the name of its arena and the layout of artifacts, which have the layers of all pipeline stages.
vLLM's own handshake is not used because `MultiConnector` forwards it to one child only.

Engines are told apart by a name that vLLM's configuration has in all their processes: under Ray
workers are no children of the engine core. Containers may share the folder and have PID namespaces
of their own. So each file names its namespace, and only the files of our own namespace are judged
by their pid.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.errors import StoreError, UnsupportedModelError
from hetero_connector.spec import ModelSpec
from hetero_connector.store.arena import ArenaHandle

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.heterocache")

_PATIENCE_S = 30.0
_published: set[str] = set()
"""Engines whose worker has announced itself from this process."""
_UNREADABLE_S = 60.0
"""Age from which a file that cannot be read, in this private folder, is removed."""


@dataclass(frozen=True)
class WorkerGeometry:
    """The description of one rank's KV caches and machine."""

    rank: int
    """The tensor-parallel rank in its pipeline stage."""
    model: ModelSpec
    """The layers of its pipeline stage."""
    attention_backends: tuple[str, ...]
    device: str
    pid: int
    """The worker's process."""
    rounding: Mapping[str, str] = field(default_factory=dict)
    """`startup.rounding.rounding` in the worker's process."""
    replay_refusal: str | None = None
    """Why this engine's windows cannot be rebuilt by a replay; None if they can."""
    stage: int = 0
    """The pipeline stage."""


def engine_name(vllm_config: VllmConfig) -> str:
    """Return a name that all processes of an engine know, and no other engine has."""
    assert vllm_config.kv_transfer_config is not None
    return f"{vllm_config.kv_transfer_config.engine_id}.{vllm_config.instance_id}"


def data_parallel_rank(vllm_config: VllmConfig) -> int | None:
    """Return this engine's rank among data-parallel engines; None if it is the only one."""
    assert vllm_config.kv_transfer_config is not None
    parallel = vllm_config.parallel_config
    rank = int(parallel.data_parallel_index)
    # Each has its own engine id, also where vLLM sets data_parallel_size to 1.
    has_dp_id = str(vllm_config.kv_transfer_config.engine_id).endswith(f"_dp{rank}")
    return rank if has_dp_id or parallel.data_parallel_size > 1 else None


def publish_geometry(engine: str, geometry: WorkerGeometry) -> None:
    """Write this rank's geometry for the scheduler side of the same engine."""
    rank = f"{geometry.stage}.{geometry.rank}"
    name = f"{engine}.{rank}.{_pid_namespace()}.{geometry.pid}.json"
    document = {
        "pid": geometry.pid,
        "pid_namespace": _pid_namespace(),
        "geometry": _encode(geometry),
    }
    _write(_directory() / name, document)
    _published.add(engine)


def collect_geometries(
    engine: str, world_size: int, patience_s: float = _PATIENCE_S
) -> list[WorkerGeometry]:
    """Return the geometry of all ranks, by pipeline stage and rank, and remove the files.

    Raises StoreError if a rank has not published its geometry: its worker runs on another host.
    """
    deadline = time.monotonic() + patience_s
    found: dict[tuple[int, int], WorkerGeometry] = {}
    while len(found) < world_size:
        found.update(_collect(engine))
        if len(found) < world_size:
            if time.monotonic() > deadline:
                if _published - {engine}:
                    raise StoreError(
                        "this process already has the KV connector of another engine, and vLLM "
                        "makes one per process: delete that LLM first, start this one in a process "
                        "of its own, or leave VLLM_ENABLE_V1_MULTIPROCESSING at 1. After an engine "
                        "that failed to start here, start a new process"
                    )
                raise StoreError(
                    f"only {len(found)} of {world_size} workers announced their KV caches. "
                    "HeteroConnector needs every worker on this host, in the same process "
                    "namespace: use --distributed-executor-backend uni, mp or ray on one node"
                )
            time.sleep(0.01)
    ranks = [found[rank] for rank in sorted(found)]
    _check_equal(ranks)
    return ranks


def publish_arena(engine: str, arena: ArenaHandle, layout: ArtifactLayout) -> None:
    """Write the arena's name, and the layout of all stages, for this engine's workers.

    They map it before the first request.
    """
    for path in _directory().glob("*.arena"):
        named = re.fullmatch(r".+\.(\d+)\.(\d+)\.arena", path.name)
        if named and named[1] == _pid_namespace() and not _is_alive(named[2]):
            path.unlink(missing_ok=True)  # left by an engine that was killed
    document = {
        "arena": asdict(arena),
        "model": layout.model.as_plain(),
        "chunk_tokens": layout.chunk_tokens,
    }
    _write(_arena_file(engine), document)


def find_arena(engine: str) -> tuple[ArenaHandle, ArtifactLayout] | None:
    """Return the arena and layout of the engine that this worker is of; None if it has none."""
    for path in _directory().glob("*.arena"):
        if path.name.startswith(f"{engine}.{_pid_namespace()}."):
            document = json.loads(path.read_text())
            model = ModelSpec.from_plain(document["model"])
            layout = ArtifactLayout(model, document["chunk_tokens"])
            return ArenaHandle(**document["arena"]), layout
    return None


def withdraw_arena(engine: str) -> None:
    _arena_file(engine).unlink(missing_ok=True)


def status_path(engine: str) -> Path:
    """Return the path of this process's status socket, and remove those of dead engines."""
    for path, namespace, pid in _status_paths():
        if namespace == _pid_namespace() and not _is_alive(pid):
            path.unlink(missing_ok=True)
    name = f"{engine}.{os.getppid()}.{_pid_namespace()}.{os.getpid()}.status"
    return _directory() / name


def status_paths() -> list[Path]:
    """Return the status sockets of this user's engines; some may be of engines that were killed."""
    return [path for path, _, _ in _status_paths()]


def sockets_of_server(engine_id: str, launcher: int | None) -> list[Path]:
    """Return the status sockets of the engines of one server on this host.

    `engine_id`: the server's, to which engines append their data-parallel rank. Two servers may
    have been given the same one; `launcher` tells them apart: the process that started the server's
    engines, in this PID namespace. None: it did not start them itself.
    """
    end = r".+" if launcher is None else rf".+\.{launcher}\.{_pid_namespace()}\.\d+"
    name = re.compile(rf"{re.escape(engine_id)}(_dp\d+)?\.{end}\.status")
    return [path for path in status_paths() if name.fullmatch(path.name)]


def _status_paths() -> Iterator[tuple[Path, str, str]]:
    for path in sorted(_directory().glob("*.status")):
        if named := re.fullmatch(r".+\.(\d+)\.(\d+)\.status", path.name):
            yield path, named[1], named[2]


def _arena_file(engine: str) -> Path:
    return _directory() / f"{engine}.{_pid_namespace()}.{os.getpid()}.arena"


def _pid_namespace() -> str:
    """Return the id of this process's PID namespace; its pid is valid only in there."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _is_alive(pid: object) -> bool:
    return Path(f"/proc/{pid}").exists()


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Write the complete file or nothing, also if the power fails."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _directory() -> Path:
    """Return this user's folder, or make it. StoreError if other users may have files in it.

    Old files in it are removed, so a link to another folder of this user is refused, too.
    """
    path = Path(tempfile.gettempdir()) / f"heterocache-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.getuid():
        problem = "belongs to another user"
    elif found.st_mode & 0o077:
        problem = f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return path
    raise StoreError(f"{path} {problem}; remove it or set TMPDIR")


def _collect(engine: str) -> dict[tuple[int, int], WorkerGeometry]:
    found = {}
    for path in _directory().glob("*.json"):
        try:
            document = json.loads(path.read_text())
            if document["pid_namespace"] != _pid_namespace():
                continue
            is_alive = _is_alive(int(document["pid"]))
            is_ours = path.name.startswith(f"{engine}.")
            geometry = _decode(document["geometry"]) if is_alive and is_ours else None
        except FileNotFoundError:
            continue  # another engine with the same id removed its own file
        except _UNREADABLE as e:
            _ignore(path, e)
            continue
        if not is_alive:
            path.unlink(missing_ok=True)  # left by an engine that was killed while it started
        elif geometry is not None:
            found[geometry.stage, geometry.rank] = geometry
            path.unlink(missing_ok=True)
    return found


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_ignored: set[Path] = set()


def _ignore(path: Path, error: Exception) -> None:
    """Skip a file that is no announcement, with one log line; remove it if it is old."""
    if path not in _ignored:
        _ignored.add(path)
        logger.warning("%s is no announcement of a worker, ignored: %r", path, error)
    with contextlib.suppress(OSError):
        found = path.lstat()
        if found.st_uid == os.getuid() and time.time() - found.st_mtime > _UNREADABLE_S:
            path.unlink()


def _check_equal(ranks: list[WorkerGeometry]) -> None:
    first_of = {x.stage: x for x in reversed(ranks)}
    for other in ranks[1:]:
        if other.model != first_of[other.stage].model:
            raise UnsupportedModelError(
                f"tensor-parallel ranks 0 and {other.rank} have different KV geometry; "
                "HeteroConnector needs equal shards. Use a tensor-parallel size that divides "
                "the number of KV heads"
            )
        if other.rounding != ranks[0].rounding:
            raise UnsupportedModelError(
                f"ranks 0 and {other.rank} of pipeline stages 0 and {other.stage} compute "
                f"differently: "
                f"{_differences(ranks[0].rounding, other.rounding)}. HeteroConnector needs "
                "ranks of one kind: give the engine equal devices, and each worker equal settings"
            )


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    return "; ".join(f"{x} {one[x]!r} and {other.get(x)!r}" for x in one if one[x] != other.get(x))


def _encode(geometry: WorkerGeometry) -> dict[str, Any]:
    return asdict(geometry)


def _decode(document: dict[str, Any]) -> WorkerGeometry:
    return WorkerGeometry(
        rank=document["rank"],
        model=ModelSpec.from_plain(document["model"]),
        attention_backends=tuple(document["attention_backends"]),
        device=document["device"],
        pid=document["pid"],
        rounding=document["rounding"],
        replay_refusal=document["replay_refusal"],
        stage=document["stage"],
    )
