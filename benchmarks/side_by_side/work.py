"""Sends the same requests to one contestant and to an engine without a connector, by turns."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine_process import CHECKPOINTS, prompt_tokens
from benchmarks.measure import DirectDisk, Memcpy, Samples, error_of_median
from benchmarks.side_by_side.contestants import Contestant, Place
from benchmarks.side_by_side.environments import environment_of
from benchmarks.side_by_side.processes import (
    Footprint,
    Service,
    footprint,
    remove_left_memory,
)
from benchmarks.side_by_side.rows import Outcome, Row
from benchmarks.side_by_side.streams import agent_sessions, never_hits
from examples.checkpoints import write_checkpoint
from examples.demo import VOCABULARY
from examples.serving import Reply, Server, engine_arguments, free_port, logprob_distance
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec.from_config import model_spec_from_config

_ANSWER_TOKENS = 8
_DECODED_TOKENS = 33
_PROMPTS_TO_FILL = 4
"""Prompts after which an engine has written to all its pages: more than `Case.blocks` hold."""
_FIRST_ERROR = re.compile(
    r"Traceback \(.*?\b(\w*(?:Error|Exception): [^\n]+)|panicked at [^\n]+\n([^\n]+)", re.DOTALL
)
"""An exception of Python or a panic of Rust."""
_INTRODUCTIONS = 5
"""Attempts of two engines to find each other."""
SETTLE_S = 2.0
"""After a prompt: most contestants save it behind the answer."""
_QUIET_BYTES_PER_S = 1 << 20
_WRITES_S = 60.0
"""The longest wait for writes behind the answers."""


@dataclass(frozen=True)
class Case:
    """One model, and the length of its prompts."""

    model: str
    tokens: int
    max_model_len: int
    blocks: int
    """Blocks in the engine's KV cache: more than one of the longest requests takes, fewer than the
    prompts that fill it (`_PROMPTS_TO_FILL`)."""
    rounds: int
    restores: int = 1
    """Restores of each prompt from memory."""
    streams: int = 0
    """Repeats of sessions and streams."""
    chunk_tokens: int = Place.chunk_tokens
    """Tokens of a contestant's chunk (see `Place`): a multiple of those of the engine's blocks."""

    @property
    def engine_args(self) -> dict[str, Any]:
        """The arguments of every engine."""
        return {"max_model_len": self.max_model_len, "num_gpu_blocks_override": self.blocks}

    @property
    def max_tokens(self) -> int:
        """The longest prompt that has room for its answer."""
        return self.max_model_len - _DECODED_TOKENS

    def prompt(self, round_: int) -> list[int]:
        """Return the prompt of a round."""
        return prompt_tokens(self.tokens, 100 + round_)

    def touch_pages(self, servers: Iterable[Server], first: int) -> None:
        """Compute prompts of no round, so that each engine has written to all its pages.

        The kernel maps memory at the first write to it, which takes longer than the write. `first`:
        the number of the first of these prompts, negative.
        """
        for number in range(_PROMPTS_TO_FILL):
            for server in servers:
                server.complete(self.prompt(first - number), 1)
        time.sleep(SETTLE_S)
        _await_writes()


def _wake(server: Server) -> None:
    """Have an idle engine compute a few tokens: its next answer does not take longer for that.

    Both answers that are compared come right after this.
    """
    server.complete(prompt_tokens(_ANSWER_TOKENS, 0), 1)


def _await_writes() -> None:
    """Wait until no process writes to a disk: contestants do so long after an answer."""
    deadline = time.monotonic() + _WRITES_S
    written = _written_bytes()
    while time.monotonic() < deadline:
        time.sleep(1.0)
        before, written = written, _written_bytes()
        if written - before < _QUIET_BYTES_PER_S:
            return


def _written_bytes() -> int:
    """Return the bytes that the kernel has written to disks: 512 for each sector."""
    lines = Path("/proc/diskstats").read_text().splitlines()
    return 512 * sum(int(line.split()[9]) for line in lines)


def useful_bytes(checkpoint: Path, num_tokens: int) -> int:
    """Return the fewest bytes from which a prompt can be resumed, by the model's arithmetic.

    They are all that attention reads of the whole chunks before the prompt's end: full attention at
    each token, and the boundary state of the last one.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    spec = model_spec_from_config(
        config, block_tokens=engine_arguments(checkpoint.name).get("block_size")
    )
    layout = ArtifactLayout(spec, spec.default_chunk_tokens())
    ends = range(layout.chunk_tokens, num_tokens + 1, layout.chunk_tokens)
    return sum(
        layout.artifact_bytes(kind, end - layout.chunk_tokens, end)
        for kind in spec.state_types
        for end in (ends if kind in spec.prefix_types else ends[-1:])
    )


STAGES = ("streams", "restart", "kill9", "reboot")
"""After the rounds, in this order: streams of requests, then the ways in which an engine ends."""


class Reference:
    """An engine without a connector, which all contestants with the same arguments share."""

    def __init__(self, case: Case, arguments: Mapping[str, Any], folder: Path) -> None:
        """`arguments`: of the engine, besides those of the case."""
        self._case = case
        checkpoint = write_checkpoint(case.model, CHECKPOINTS)
        arguments = case.engine_args | dict(arguments)
        arguments["max_logprobs"] = VOCABULARY
        self.server = Server(checkpoint, folder / "reference.log", None, arguments)
        self._answers: dict[int, Reply] = {}
        self._power: float | None = None

    def start(self) -> None:
        """Start the engine, and let it write to all its pages."""
        self.server.start()
        self._case.touch_pages([self.server], -1)

    def compute(self, round_: int) -> Timed:
        """Compute the prompt of a round."""
        self.server.reset_prefix_cache()
        return _timed(self.server, self._case.prompt(round_))

    def answer(self, round_: int) -> Reply:
        """Return the answer to a prompt from the engine's own hit: it was just computed.

        It has the logprobs of the whole vocabulary: whatever a contestant answers is in it.
        """
        if round_ not in self._answers:
            self._answers[round_] = self._all_logprobs(self._case.prompt(round_))
        return self._answers[round_]

    def _all_logprobs(self, prompt: Sequence[int]) -> Reply:
        return self.server.complete(prompt, _ANSWER_TOKENS, VOCABULARY)

    def power(self) -> float:
        """Return the distance of logprobs that another early token of the first prompt makes."""
        if self._power is None:
            changed = self._case.prompt(0)
            changed[len(changed) // 8] ^= 1
            self._power = logprob_distance(self.answer(0), self._all_logprobs(changed))
        return self._power


class References:
    """The running references of one case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._running: dict[tuple[tuple[str, Any], ...], Reference] = {}

    def of(self, contestant: Contestant) -> Reference:
        """Return the reference of a contestant, and start it if it does not run."""
        key = tuple(sorted(contestant.engine_args.items()))
        if key not in self._running:
            folder = self._folder / f"reference-{len(self._running)}"
            folder.mkdir(exist_ok=True)
            reference = Reference(self._case, dict(key), folder)
            try:
                reference.start()
            except BaseException:
                reference.server.kill()
                raise
            self._running[key] = reference
        return self._running[key]

    def __enter__(self) -> References:
        return self

    def __exit__(self, *_: object) -> None:
        for reference in self._running.values():
            reference.server.kill()


class Arena:
    """The running servers of one contestant."""

    def __init__(self, contestant: Contestant, case: Case, folder: Path) -> None:
        """Make the contestant's environment. Raises EnvironmentFailedError."""
        self.contestant, self.case, self.folder = contestant, case, folder
        environment = environment_of(
            contestant.environment or contestant.name, contestant.pins, contestant.debian
        )
        files = folder / "files"
        files.mkdir(parents=True)
        ports = [free_port() for _ in range(4)]
        self.place = Place(files, environment, ports, case.chunk_tokens)
        self.checkpoint = folder / "checkpoint" / case.model
        """A copy, so that a fault can change the weights where they are."""
        shutil.copytree(write_checkpoint(case.model, CHECKPOINTS), self.checkpoint)
        self.services: list[Service] = []
        self._variables = environment.variables | contestant.variables(self.place)
        self.server = self._server("server")
        self.prefiller: Server | None = None
        if contestant.has_prefiller:
            self.prefiller = self._server("prefiller")
            # Each engine listens for the other's handshake.
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.place.ports[1])}
            self.prefiller.environment = self._variables | port

    @property
    def engine_args(self) -> dict[str, Any]:
        """The arguments of the contestant's engines."""
        return self.case.engine_args | dict(self.contestant.engine_args)

    def _server(self, name: str) -> Server:
        return Server(
            self.checkpoint,
            self.folder / f"{name}.log",
            self.contestant.transfer(self.place),
            self.engine_args,
            self._variables,
            python=str(self.place.environment.bin / "python"),
        )

    def start_services(self) -> None:
        """Start what the engine needs."""
        for number, what in enumerate(self.contestant.services(self.place)):
            log = self.folder / f"service-{number}.log"
            self.services.append(Service(what, self._variables, log))

    @property
    def engines(self) -> list[Server]:
        """The contestant's engines: two if one prefills for the other."""
        return [x for x in (self.server, self.prefiller) if x is not None]

    def start_all(self) -> None:
        """Start all engines together, and let them write to all their pages."""
        for engine in self.engines:
            engine.launch()
        for engine in self.engines:
            engine.start()
        self.case.touch_pages(self.engines, -1)
        if self.prefiller is not None:
            self._introduce()

    def _introduce(self) -> None:
        """Restore a prompt until it succeeds: on few cores the engines' first handshake times out.

        Raises what the last of `_INTRODUCTIONS` attempts raised.
        """
        for attempt in range(_INTRODUCTIONS):
            self.server.reset_prefix_cache()
            try:
                self.restored(prompt_tokens(1000, attempt))
            except (OSError, RuntimeError):
                if attempt == _INTRODUCTIONS - 1:
                    raise
            else:
                return

    def start(self) -> float:
        """Start the engine; return its seconds."""
        started = time.perf_counter()
        self.server.start()
        return time.perf_counter() - started

    def stop(self) -> None:
        """Stop the engine as an operator does."""
        self.server.stop()

    def kill_services(self) -> None:
        """Kill what the engine needs."""
        for service in self.services:
            service.kill()
        self.services.clear()

    def stop_services(self) -> None:
        """Stop what the engine needs."""
        for service in reversed(self.services):
            service.stop()
        self.services.clear()

    def restored(self, prompt: Sequence[int], **request: Any) -> Reply:
        """Complete a prompt; where there is a prefiller, with state that is taken from it."""
        if self.prefiller is not None:
            # A prefiller that pushes state knows the two requests by their name.
            request["request_id"] = uuid.uuid4().hex
            body = {
                "model": self.prefiller.model.name,
                "prompt": list(prompt),
                "max_tokens": 1,
                "kv_transfer_params": {"do_remote_decode": True},
                "request_id": request["request_id"],
            }
            handed = self.prefiller.post("/v1/completions", body)["kv_transfer_params"]
            before = self._received_tokens()
            reply = self.server.complete(
                prompt, _ANSWER_TOKENS, **request, kv_transfer_params=handed
            )
            # The answer reports what the prefiller found in its cache, not what came from it.
            return replace(reply, cached_tokens=self._received_tokens() - before)
        return self.server.complete(prompt, _ANSWER_TOKENS, **request)

    def _received_tokens(self) -> int:
        """Return the tokens that the engine's connector has loaded in its life."""
        series = self.server.series("vllm:external_prefix_cache_hits_total")
        return int(sum(value for _, value in series))

    def footprint(self) -> Footprint:
        """Return what the contestant's processes take of the machine."""
        groups = [engine.group for engine in self.engines]
        return footprint(groups + [service.group for service in self.services])

    def forget_pages(self) -> None:
        """Drop the contestant's files from the kernel's page cache, as a reboot does."""
        os.sync()
        for path in self.place.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """End all processes."""
        for server in self.engines:
            server.kill()
        self.kill_services()
        remove_left_memory()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Timed:
    """A decoded answer with the seconds of its tokens."""

    reply: Reply
    token_s: float


def _timed(server: Server, prompt: Sequence[int]) -> Timed:
    """Complete a prompt with a longer answer."""
    began = time.perf_counter()
    reply = server.complete(prompt, _DECODED_TOKENS)
    total_s = time.perf_counter() - began
    return Timed(reply, (total_s - reply.ttft_s) / (_DECODED_TOKENS - 1))


def measure(
    contestant: Contestant,
    case: Case,
    folder: Path,
    stages: Sequence[str],
    references: References,
    fault: Callable[[str, Arena, Reference, Row], Outcome],
    keep: Callable[[Row], None],
) -> Row:
    """Run the stages; return a row, with an error where something did not run.

    `stages`: of `STAGES`, and faults. `fault` runs one. `keep` gets the row before each stage.
    """
    row = Row(
        contestant.name,
        contestant.version,
        case.model,
        rounds=case.rounds,
        stages=list(stages),
        prompt_tokens=case.tokens,
    )
    stage = "environment"
    try:
        arena = Arena(contestant, case, folder)
        stage = "reference"
        reference = references.of(contestant)
    except Exception as error:
        traceback.print_exc()
        return replace(row, error=f"{stage}: {error}")
    with arena:
        run = _Run(arena, reference, row)
        stage = "start"
        try:
            arena.start_services()
            arena.start_all()
            stage = "rounds"
            run.rounds()
            if not contestant.has_prefiller and contestant.transfer(arena.place) is not None:
                for stage in stages:
                    keep(replace(run.row, error=f"{stage}: it was stopped here"))
                    if stage == "streams":
                        run.streams()
                    elif stage in STAGES:
                        run.after(stage)
                    else:
                        outcome = fault(stage, arena, reference, run.row)
                        run.row = replace(run.row, faults=run.row.faults | {stage: outcome})
        except Exception as error:
            traceback.print_exc()
            run.row = replace(run.row, error=f"{stage}: {cause(folder, error)}")
        return run.row


class _Run:
    """Fills the row of one contestant."""

    def __init__(self, arena: Arena, reference: Reference, row: Row) -> None:
        self._arena, self._reference = arena, reference
        self.row = row

    def rounds(self) -> None:
        """Compute, hit and restore a new prompt in each round."""
        arena, case, samples = self._arena, self._arena.case, Samples()
        size_bytes = useful_bytes(arena.checkpoint, case.tokens)
        memcpy = Memcpy(size_bytes)
        restored: list[int] = []
        self.row = replace(self.row, useful_bytes=size_bytes)
        before = arena.contestant.stored_bytes(arena.place, arena.server)
        for round_ in range(case.rounds):
            prompt = case.prompt(round_)
            for name in ("plain", "save") if round_ % 2 else ("save", "plain"):
                if name == "plain":
                    found = self._reference.compute(round_)
                else:
                    found = _timed(arena.engines[-1], prompt)
                samples.add(f"cold {name}", found.reply.ttft_s)
                samples.add(f"decode {name}", found.token_s)
                if name == "plain":
                    self._reference.answer(round_)
            time.sleep(SETTLE_S)
            for _ in range(case.restores):
                reply = None
                if arena.contestant.transfer(arena.place) is not None:
                    arena.server.reset_prefix_cache()
                    _wake(arena.server)
                    reply = arena.restored(prompt)
                _wake(arena.server)
                samples.add("local", arena.server.complete(prompt, _ANSWER_TOKENS).ttft_s)
                if reply is not None:
                    samples.add("memory", reply.ttft_s)
                    samples.add("memcpy", memcpy.reused())
                    restored.append(reply.cached_tokens or 0)
                    self._judge("memory", round_, reply)
        stored = arena.contestant.stored_bytes(arena.place, arena.server)
        taken = arena.footprint()
        plain = footprint([self._reference.server.group])
        self.row = replace(
            self.row,
            seconds=samples.medians(),
            spread=_spread(samples),
            prefill_ratio=samples.paired_ratio("cold save", "cold plain"),
            decode_ratio=samples.paired_ratio("decode save", "decode plain"),
            added_s=_added_s(samples, "memory"),
            added_error_s=error_of_median(samples.paired_differences("memory", "local")),
            added_over_memcpy=_added_over_memcpy(samples),
            power=self._reference.power(),
            restored_tokens={"memory": min(restored, default=0)},
            stored_bytes=None if stored is None else (stored - (before or 0)) // case.rounds,
            extra_processes=taken.processes - plain.processes,
            extra_memory_bytes=taken.memory_bytes - plain.memory_bytes,
        )

    def streams(self) -> None:
        """Play sessions, and prompts that never hit, next to the reference."""
        arena, samples = self._arena, Samples()
        turns = [("plain", self._reference.server), ("save", arena.server)]
        for repeat in range(arena.case.streams):
            for name, server in turns if repeat % 2 else turns[::-1]:
                samples.add(f"agents {name}", agent_sessions(server, repeat))
                samples.add(f"stream {name}", never_hits(server, repeat))
        self.row = replace(
            self.row,
            agents_ratio=samples.paired_ratio("agents save", "agents plain"),
            stream_ratio=samples.paired_ratio("stream save", "stream plain"),
        )

    def after(self, how: str) -> None:
        """End the engine in one way, start it, and ask for all prompts again."""
        arena, samples = self._arena, Samples()
        if how == "kill9":
            arena.server.kill()
        else:
            arena.stop()
        if how == "reboot":
            arena.stop_services()
            arena.forget_pages()
            arena.start_services()
        disk = DirectDisk(arena.folder, self.row.useful_bytes)
        # As old as the memory of the engine that starts, and used as often: never since.
        idle = [disk.memory() for _ in range(arena.case.rounds)]
        start_s = arena.start()
        arena.case.touch_pages([arena.server], -1 - _PROMPTS_TO_FILL)
        restored: list[int] = []
        for round_ in range(arena.case.rounds):
            prompt = arena.case.prompt(round_)
            _wake(arena.server)
            reply = arena.restored(prompt)
            _wake(arena.server)
            samples.add("local", arena.server.complete(prompt, _ANSWER_TOKENS).ttft_s)
            samples.add(how, reply.ttft_s)
            restored.append(reply.cached_tokens or 0)
            self._judge(how, round_, reply)
            samples.add("limit", self.row.useful_bytes / disk.limit())
            verified = disk.verified_limit(idle.pop())
            samples.add("verified limit", self.row.useful_bytes / verified)
        disk.close()
        self.row = replace(
            self.row,
            seconds=self.row.seconds
            | {how: samples.median(how)}
            | {f"{how} {name}": samples.median(name) for name in ("limit", "verified limit")},
            start_s=self.row.start_s | {how: start_s},
            restored_tokens=self.row.restored_tokens | {how: min(restored)},
            after_s=self.row.after_s | {how: _added_s(samples, how)},
        )

    def _judge(self, how: str, round_: int, reply: Reply) -> None:
        distance = logprob_distance(self._reference.answer(round_), reply)
        worst = max(self.row.distances.get(how, 0.0), distance)
        self.row = replace(self.row, distances=self.row.distances | {how: worst})


def _added_s(samples: Samples, name: str) -> float | None:
    """Return the median of what restores add to the own hits that follow them."""
    added = samples.paired_differences(name, "local")
    return statistics.median(added) if added else None


def _added_over_memcpy(samples: Samples) -> float | None:
    """Return the median of what a restore adds to the hit over the copy of the same turn."""
    if "memory" not in samples.by_name:
        return None
    found = samples.by_name
    turns = zip(found["memory"], found["local"], found["memcpy"], strict=True)
    return statistics.median((memory - local) / memcpy for memory, local, memcpy in turns)


def _spread(samples: Samples) -> dict[str, float]:
    """Return the largest over the smallest sample, by name."""
    return {name: max(values) / min(values) for name, values in samples.by_name.items()}


def cause(folder: Path, error: Exception) -> str:
    """Return the first error in the logs of a folder; the last line of `error` if there is none.

    Only the log of the process that failed first names the reason; others say that it failed.
    """
    for log in sorted(folder.glob("*.log")):
        found = _FIRST_ERROR.search(log.read_text(errors="replace"))
        if found:
            return str(found[1] or found[2]).strip()[:300]
    return (str(error).strip() or repr(error)).splitlines()[-1].strip()[-300:]
