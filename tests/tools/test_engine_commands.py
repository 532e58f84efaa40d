"""`heterocache status|top|clear|warm|drain` at engines whose scheduler side and store are real."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.messages import WorkerReport
from hetero_connector.engine.scheduler import status_socket
from hetero_connector.engine.scheduler.status_socket import short_address
from hetero_connector.engine.startup import rendezvous
from hetero_connector.session_ids import session_key
from hetero_connector.tools import cli, engines, live
from tests.clock import Clock
from tests.engine.fakes import FakeRequest
from tests.engine.socket_engine import SocketEngine
from tests.engine.stepped import tokens
from tests.waiting import until

GUIDE = Path(__file__).parents[2] / "docs/guides/admin.md"

Start = Callable[..., SocketEngine]
Run = Callable[..., tuple[int, str, str]]
Question = Mapping[str, Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where engines are found."""
    path = tmp_path / "sockets"
    path.mkdir()
    monkeypatch.setattr(rendezvous, "_directory", lambda: path)
    return path


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[SocketEngine] = []

    def start(*arguments: object, **options: object) -> SocketEngine:
        started.append(SocketEngine(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def turn(name: str, count: int = 256, seed: int = 0, **request: object) -> FakeRequest:
    return FakeRequest(name, tokens(count, seed), **request)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "command",
    [
        ["clear", "--all", "--yes"],
        ["warm", "ids.json"],
        ["drain"],
        ["top"],
        ["status"],
        ["timeline"],
    ],
)
def test_without_an_engine_it_says_so(run: Run, command: list[str]) -> None:
    code, out, err = run(*command)
    assert code == 2
    assert out == ""
    assert "no engine of this user runs" in err
    assert "set TMPDIR as the engine has it" in err
    assert "PrivateTmp" in err


@pytest.mark.parametrize("command", [["top", "--once"], ["status"], ["timeline"], ["drain"]])
def test_the_engines_that_run_are_named_if_another_is_asked_for(
    start: Start, run: Run, command: list[str]
) -> None:
    start()
    code, out, err = run(*command, "--engine", "other")
    assert (code, out) == (2, "")
    assert "no running engine is called 'other': there are m (pid 4711)" in err


def test_the_directories_by_which_engines_can_be_chosen_are_named(
    start: Start, run: Run, tmp_path: Path
) -> None:
    start(ssd_dir=tmp_path / "kv", ssd_bytes=1 << 20)
    assert f"there are m (pid 4711) at {tmp_path}/kv\n" in run("status", "--engine", "other")[2]


@pytest.mark.parametrize("command", [["top", "--once"], ["status"], ["timeline"], ["drain"]])
def test_a_folder_that_is_open_to_others_is_refused_with_what_to_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"heterocache-{os.getuid()}").mkdir(mode=0o755)
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert "is open to other users (mode 755); remove it or set TMPDIR" in err


def test_a_session_a_salt_and_everything_are_cleared(start: Start, run: Run) -> None:
    engine = start()
    mine, salted, plain = turn("1", session_id="s"), turn("2", cache_salt="t"), turn("3", seed=9)
    for request in (mine, salted, plain):
        engine.run(request)
    code, out, _ = run("clear", "--session", "s")
    assert code == 0
    assert "m (pid 4711): forgot 4 chunks" in out
    assert (engine.stored(mine), engine.stored(salted), engine.stored(plain)) == (0, 256, 256)
    code, out, _ = run("clear", "--salt", "t", "--json")
    assert code == 0
    assert json.loads(out)[0]["cleared"] == "salt"
    assert (engine.stored(salted), engine.stored(plain)) == (0, 256)
    code, out, _ = run("clear", "--model", "adapter")
    assert (code, engine.stored(plain)) == (0, 256)
    assert "no session known here has used the model 'adapter'" in out
    code, out, _ = run("clear", "--model", "m")
    assert (code, engine.stored(plain)) == (0, 0)
    assert out == "m (pid 4711): forgot 4 chunks\n"
    engine.run(turn("4", seed=9))
    assert engine.stored(plain) == 256
    code, out, _ = run("clear", "--all", "--yes")
    assert (code, engine.stored(plain)) == (0, 0)
    assert "forgot everything" in out
    code, _, err = run("clear", "--session", "s")
    assert code == 1
    assert "no such session" in err


@pytest.mark.parametrize("answer", [None, "n", "y"])
def test_clearing_everything_asks_first(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    engine = start()
    request = turn("1")
    engine.run(request)
    stdin = io.StringIO(f"{answer or ''}\n")
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr(stdin, "isatty", lambda: answer is not None)
    code, _, err = run("clear", "--all")
    assert code == (0 if answer == "y" else 2)
    assert engine.stored(request) == (0 if answer == "y" else 256)
    assert ("--yes" if answer is None else "Forget everything that is stored by m (pid") in err


def test_clearing_everything_asks_nobody_where_stdin_is_closed(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr("sys.stdin", None)
    code, _, err = run("clear", "--all")
    assert code == 2
    assert "add --yes" in err


@pytest.mark.parametrize(
    "words",
    [[], ["--all", "--salt", "x"], ["--all", "--session", "x"], ["--model", "x", "--salt", "y"]],
)
def test_what_to_clear_must_be_clear(start: Start, run: Run, words: list[str]) -> None:
    start()
    code, _, err = run("clear", *words)
    assert code == 2
    assert "--session" in err


def test_a_prompt_is_staged_in_dram(start: Start, run: Run, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    request = turn("1")
    engine.run(request)
    engine.leave_to_ssd()
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(request.all_token_ids))
    code, out, _ = run("warm", ids)
    assert code == 0
    assert "256 of 256 tokens are stored, 256 of them in DRAM" in out
    occupancy = {x.tier: sum(x.artifacts.values()) for x in engine.engine.store.occupancy()}
    assert occupancy[Tier.DRAM] >= 5, "four chunks and their checkpoint"
    ids.write_text("[5, 6, 7]")
    code, out, _ = run("warm", ids)
    assert code == 1
    assert "0 of 3 tokens are stored" in out
    ids.write_text("[-5]")
    code, _, err = run("warm", ids)
    assert code == 2
    assert "token ids must be integers" in err
    code, _, err = run("warm", tmp_path / "missing")
    assert code == 2
    assert "missing" in err


def test_a_pinned_prompt_outlives_what_comes_after_it(
    start: Start, run: Run, tmp_path: Path
) -> None:
    engine = start(dram_bytes=200 << 10)
    pinned, session, other = turn("1"), turn("2", seed=2, session_id="s"), turn("3", seed=3)
    for request in (pinned, session, other):
        engine.run(request)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(pinned.all_token_ids))
    code, out, _ = run("pin", ids, "--seconds", 60)
    assert code == 0, out
    assert re.search(r"pinned 256 tokens, [\d.]+ KiB, for 60 s", out)
    for seed in range(10, 40):
        engine.run(turn(f"{seed}", seed=seed))
    assert (engine.stored(pinned), engine.stored(other)) == (256, 0)
    code, out, _ = run("unpin", ids)
    assert (code, out) == (0, "m (pid 4711): unpinned 256 tokens\n")
    code, out, _ = run("unpin", ids)
    assert (code, out) == (1, "m (pid 4711): there was no such pin\n")
    for seed in range(40, 70):
        engine.run(turn(f"{seed}", seed=seed))
    assert engine.stored(pinned) == 0
    engine.run(turn("s2", seed=2, session_id="s"))
    assert run("pin", "--session", "s")[0] == 0
    assert run("unpin", "--session", "s")[0] == 0
    for words in (["pin"], ["unpin"], ["pin", ids, "--session", "s"]):
        code, _, err = run(*words)
        assert code == 2
        assert "say what to pin" in err


def test_a_drained_engine_stores_nothing_until_it_resumes(
    start: Start, run: Run, tmp_path: Path
) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    engine.run(turn("1"))
    assert run("drain")[:2] == (
        0,
        "m (pid 4711): stores nothing new; all that it stored is on SSD\n",
    )
    for shown in (run("top", "--once", "--interval", 0.1)[1], run("status")[1]):
        assert "healthy, draining" in shown
    later = turn("2", seed=3)
    engine.run(later)
    assert engine.stored(later) == 0
    code, out, _ = run("drain", "--resume")
    assert (code, out) == (0, "m (pid 4711): stores again\n")
    again = turn("4", seed=3)
    engine.run(again)
    assert engine.stored(again) == 256


def test_draining_to_an_ssd_that_cannot_be_written_says_so(
    start: Start, run: Run, tmp_path: Path
) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    engine.engine.store.catalog.pause_writing(math.inf)
    engine.run(turn("1"))
    code, out, _ = run("drain", "--wait", 60)
    assert code == 1
    assert "stores nothing new; the SSD cannot be written" in out


def test_an_engine_whose_cache_has_stopped_says_so(start: Start, run: Run, tmp_path: Path) -> None:
    engine = start()
    engine.run(turn("1", session_id="s"))
    (tmp_path / "ids.json").write_text("[1]")
    engine.engine.side.on_report(WorkerReport(broken=True))
    for command in (["status"], ["top", "--once", "--interval", 0.1]):
        assert "not working: cache_alive" in run(*command)[1]
    for options in ([], ["--json"]):
        assert run("status", *options)[0] == 1
    assert engine.engine.recorder.gauge("heterocache_cache_alive") == 0.0
    for command in (["warm", tmp_path / "ids.json"], ["pin", "--session", "s"]):
        code, out, err = run(*command)
        assert (code, out) == (1, "")
        assert "restores nothing since a load has failed: restart it" in err
    assert run("status", "--json")[1].count('"cache_alive": false') == 1


def test_an_engine_that_is_out_of_its_fleet_says_so(start: Start, run: Run) -> None:
    engine = start()
    for joined in (1.0, 0.0):
        engine.engine.recorder.set("heterocache_directory_joined", joined)
        text = "healthy" if joined else "not working: directory_joined"
        for command in (["status"], ["top", "--once", "--interval", 0.1]):
            assert text in run(*command)[1]


def test_pins_are_listed(start: Start, run: Run, tmp_path: Path) -> None:
    engine = start()
    assert "pin" not in run("status")[1]
    by_client = {"kv_transfer_params": {"heterocache": {"pin_s": 600}}}
    engine.run(turn("1", session_id="s", cache_salt="t", **by_client))
    engine.run(turn("2", count=128, seed=2))
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tokens(128, 2)))
    assert run("pin", ids, "--seconds", 60)[0] == 0
    status = json.loads(run("status", "--json")[1])[0]["pins"]
    prompt, session = status["first_to_end"]
    name = session_key("t", "s").hex()
    assert prompt["name"].startswith("prompt-")
    assert (prompt["tokens"], prompt["by"]) == (128, "operator")
    assert 0 < prompt["ends_in_s"] <= 60
    assert (session["name"], session["tokens"], session["by"]) == (name, 256, "client")
    assert 60 < session["ends_in_s"] <= 600
    assert session["tenant_bytes"] + prompt["tenant_bytes"] == status["bytes"] < status["max_bytes"]
    assert status["max_tenant_bytes"] == status["max_bytes"] // 2 == (1 << 20) // 4
    shown = run("top", "--once", "--interval", 0.1)[1]
    for text in (shown, run("status")[1]):
        assert re.search(r"^2 pins: [\d.]+ KiB of at most 512 KiB \(\d+%\)$", text, re.MULTILINE)
    assert re.search(rf"{name[:16]} .* idle \d+ s, pinned (5\d\d|600) s", shown)
    assert run("unpin", "--session", name[:16])[0] == 0
    assert run("status", "--json")[1].count('"by": "client"') == 0


def test_a_session_that_was_recognised_has_one_name(start: Start, run: Run) -> None:
    engine = start()
    engine.serve(turn("1"))
    status = json.loads(run("status", "--json")[1])[0]
    name = status["decisions"][0]["session"]
    assert name.startswith("recognised-")
    assert f" {name} " in run("top", "--once", "--interval", 0.1)[1]
    assert run("pin", "--session", name)[0] == 0


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["pin", "--session", "s"], "--seconds"),
        (["warm", "ids.json"], "--keep"),
        (["warm", "ids.json"], "--wait"),
        (["drain"], "--wait"),
        (["scrub"], "--rate"),
        (["top", "--once"], "--interval"),
        (["timeline"], "--seconds"),
    ],
)
def test_a_number_out_of_its_range_names_the_option(
    start: Start, run: Run, command: list[str], option: str
) -> None:
    start()
    for number in ("-5", "0", "nan", "1e30", "soon"):
        code, out, err = run(*command, option, number)
        assert (code, out) == (2, "")
        unwrapped = " ".join(err.replace("│", "").split())
        assert f"'{option}': expected a number from " in unwrapped
        assert f", got {number}" in unwrapped


def test_the_engine_takes_what_the_options_take(start: Start, run: Run, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    engine.run(turn("1", session_id="s"))
    for seconds in (0.001, 86_400):
        assert run("pin", "--session", "s", "--seconds", seconds)[0] == 0
    assert run("drain", "--wait", 86_400)[0] == 0
    for rate in (0.001, 1e6):
        assert run("scrub", "--rate", rate)[0] == 0
        run("scrub", "--stop")


def test_status_in_a_pipe_is_not_cut(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    engine = start("e", "models/" + "long-name-" * 20)
    name = "cmpl-" + "0123456789" * 8
    engine.serve(turn(name))
    out = run("status")[1]
    assert f" {name} " in out
    assert "long-name-" * 20 in out.splitlines()[0]


def test_a_scrub_is_begun_watched_and_stopped(start: Start, run: Run, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    engine.run(turn("1"))
    assert engine.engine.store.flush(10), "checksums are made before the writes"
    assert run("scrub", "--stop")[:2] == (0, "m (pid 4711): nothing was scrubbed yet\n")
    code, out, _ = run("scrub", "--rate", 0.001)
    assert code == 0
    assert re.search(r"m \(pid 4711\): running: (0|25)% of 4 chunks checked", out)
    assert "scrubbing: " in run("top", "--once", "--interval", 0.1)[1]
    code, _, err = run("scrub")
    assert code == 1
    assert "running already" in err
    assert "stopped: " in run("scrub", "--stop")[1]
    assert run("scrub", "--rate", 1000)[0] == 0
    until(lambda: "complete" in json.dumps(json.loads(run("status", "--json")[1])[0]["activity"]))


def test_an_engine_that_refuses_says_why(start: Start, run: Run) -> None:
    start()
    code, out, err = run("drain")
    assert (code, out) == (1, "")
    assert "no ssd_dir" in err


def test_one_of_several_engines_is_chosen(start: Start, run: Run, tmp_path: Path) -> None:
    one = start("one", "models/one", ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    two = start("two", "models/two")
    request = turn("1")
    for engine in (one, two):
        engine.run(turn("1"))
    code, _, err = run("clear", "--all", "--yes")
    assert code == 2
    assert "--engine" in err
    assert f"models/one (pid 4711) at {tmp_path}/ssd; models/two (pid 4711)" in err
    code, _, err = run("clear", "--all", "--yes", "--engine", "three")
    assert code == 2
    assert "'three'" in err
    assert one.stored(request) == two.stored(request) == 256
    assert run("clear", "--all", "--yes", "--engine", "two")[0] == 0
    assert (one.stored(request), two.stored(request)) == (256, 0)
    assert run("clear", "--all", "--yes", "--engine", tmp_path / "ssd")[0] == 0
    assert one.stored(request) == 0
    code, out, _ = run("clear", "--all", "--yes", "--engine", "4711", "--json")
    assert code == 0
    assert [x["engine"] for x in json.loads(out)] == ["one", "two"]
    assert len(json.loads(run("status", "--json", "--engine", "models/two")[1])) == 1


def test_top_shows_rates_tiers_and_sessions_in_80_columns(start: Start, tmp_path: Path) -> None:
    engine = start("e", "a-model-with-a-long-name/" * 4, ssd_dir=tmp_path, ssd_bytes=1 << 22)
    for number in range(12):
        engine.run(turn(f"{number}", seed=number, session_id=f"{number}"))
    watched = live.Watched(None, engines.choose(None).running)
    before = watched.look()
    engine.run(turn("again", seed=3, session_id="3"))
    console = Console(width=80, record=True, file=io.StringIO())
    after = watched.look()
    console.print(live.draw(before, after))
    shown = console.export_text().splitlines()
    assert max(map(len, shown)) <= 80
    text = "\n".join(shown)
    rates = {}
    for source in ("engine cache", "dram", "computed"):
        found = re.search(rf"^ *{source} +([\d,]+) .* ([\d,]+) *$", text, re.MULTILINE)
        assert found is not None
        rates[source] = (int(found[1].replace(",", "")), found[2])
    assert "healthy, no load waits" in text
    assert rates["engine cache"] == (0, "0")
    assert rates["dram"][1] == "192"
    assert rates["computed"][1] == "3,136"
    assert rates["dram"][0] == pytest.approx(3 * rates["computed"][0], rel=0.01), "192 and 64"
    assert "sessions: 0 running of the newest 12" in text
    assert sum("idle" in line for line in shown) == 8
    assert text.count("capacity") == 1


def test_top_ends_after_one_look(start: Start, run: Run) -> None:
    start()
    code, out, _ = run("top", "--once", "--interval", 0.1)
    assert code == 0
    assert "m (pid 4711)" in out
    assert "\x1b" not in out, "it is no terminal"


def test_an_engine_that_hangs_is_named_and_the_others_serve(
    start: Start, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.run(turn("1"))
    asked = engines.ask
    hanging = rendezvous.status_path("hanging")

    def ask(path: Path, question: Question, timeout_s: float = 5.0) -> dict[str, Any]:
        return asked(path, question, 0.2 if path == hanging else 60.0)

    monkeypatch.setattr(engines, "ask", ask)
    monkeypatch.setenv("COLUMNS", "1000")  # a heading is cut at the width of the terminal
    with socket.socket(socket.AF_UNIX) as listener:
        with short_address(hanging) as address:
            listener.bind(address)
        listener.listen()
        code, out, err = run("status")
        assert code == 1
        assert "pid 4711" in out
        assert f"{hanging} hangs" in err
        code, out, err = run("top", "--once", "--interval", 0.1)
        assert code == 1
        assert f"the engine at {hanging}\nhas not answered" in out
        code, out, err = run("clear", "--all", "--yes")
        assert (code, out) == (2, "")
        assert f"{hanging} hangs" in err
        assert "several engines run here: choose with --engine" in err
        assert engine.stored(turn("1")) == 256
        code, out, err = run("clear", "--all", "--yes", "--engine", "other")
        assert (code, out) == (1, "")
        assert err == f"heterocache: the engine at {hanging} hangs, it does not answer\n"
        assert run("status", "--engine", "m")[0] == 0
        code, out, err = run("clear", "--all", "--yes", "--engine", "m")
        assert (code, out) == (0, "m (pid 4711): forgot everything\n")
        assert f"{hanging} hangs" in err


@pytest.mark.parametrize("is_ending", [True, False])
def test_an_engine_that_breaks_off_its_answer_hangs_unless_it_is_gone_then(is_ending: bool) -> None:
    path = rendezvous.status_path("e")
    with socket.socket(socket.AF_UNIX) as listener:
        with short_address(path) as address:
            listener.bind(address)
        listener.listen()
        listener.settimeout(60)

        def serve() -> None:
            for _ in range(1 if is_ending else 2):
                connection, _ = listener.accept()
                if is_ending:
                    listener.close()
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        found = engines.ask_all({path: "status"}, 60)
    assert found == ({} if is_ending else {path: None})


class Asked:
    """In place of `engines.ask`: some engines hang, or are gone; it keeps what was asked."""

    def __init__(self) -> None:
        self.questions: list[tuple[Path, str]] = []
        self.hanging: set[Path] = set()
        self.gone_after: dict[Path, int] = {}
        """The number of answers that an engine gives before its end."""
        self._ask = status_socket.ask

    def __call__(self, path: Path, question: Question, timeout_s: float = 5.0) -> dict[str, Any]:
        if path in self.hanging:
            raise TimeoutError
        earlier = sum(path == x for x, _ in self.questions)
        if earlier >= self.gone_after.get(path, math.inf):
            raise ConnectionRefusedError
        self.questions.append((path, question["get"]))
        return self._ask(path, question, 60.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(engines, "ask", asked)
    return asked


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["status", "--json"],
        ["drain"],
        ["drain", "--json"],
        ["timeline"],
        ["clear", "--all", "-y"],
    ],
)
def test_the_only_engine_hangs(start: Start, run: Run, asked: Asked, command: list[str]) -> None:
    path = start().path
    asked.hanging.add(path)
    code, out, err = run(*command)
    assert (code, out) == (1, "[]\n" if "--json" in command else "")
    assert err == f"heterocache: the engine at {path} hangs, it does not answer\n"


def draw(before: dict[Path, live.Look], after: dict[Path, live.Look]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(live.draw(before, after))
    return console.export_text()


def test_top_goes_on_while_an_engine_hangs_and_says_since_when(start: Start, asked: Asked) -> None:
    one, two = start("one", "one"), start("two", "two")
    clock = Clock()
    watched = live.Watched(None, engines.choose(None, may_be_all=True).running, clock)
    looks = [watched.look()]
    asked.hanging.add(two.path)
    for _ in range(2):
        looks.append(watched.look())
        clock.passes(60)
        shown = draw(*looks[-2:])
        since = time.strftime("%H:%M:%S", time.localtime(Clock().now_s))
        assert f"two (pid 4711)\nhas not answered since {since}: it is busy, hangs or" in shown
        assert shown.count("healthy") == 1
    asked.hanging = {one.path}
    looks.append(watched.look())
    assert draw(*looks[-2:]).count("healthy") == 1
    assert looks[-1][one.path].silent_since == clock.now_s
    asked.hanging.clear()
    assert draw(looks[-1], watched.look()).count("healthy") == 2


def test_top_asks_the_engines_that_it_shows_and_for_no_more(start: Start, asked: Asked) -> None:
    one, two = start("one", "one"), start("two", "two")
    watched = live.Watched("one", engines.choose("one").running)
    watched.look()
    asked.questions.clear()
    assert list(watched.look()) == [one.path]
    assert asked.questions == [(one.path, "live")]
    new, other = start("three", "one"), start("four", "four")
    assert set(watched.look()) == {one.path, new.path}
    asked.questions.clear()
    assert set(watched.look()) == {one.path, new.path}
    assert sorted(asked.questions) == sorted([(one.path, "live"), (new.path, "live")])
    assert other.path != two.path


def test_top_asks_known_and_new_engines_at_the_same_time(
    start: Start, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("one")
    watched = live.Watched(None, engines.choose(None).running)
    two = start("two")
    asked.questions.clear()
    both = threading.Barrier(2)

    def ask(path: Path, question: Question, timeout_s: float) -> dict[str, Any]:
        both.wait(60)
        return asked(path, question, timeout_s)

    monkeypatch.setattr(engines, "ask", ask)
    looks = watched.look()
    assert sorted(asked.questions) == sorted((x, "live") for x in (one.path, two.path))
    assert draw({}, looks).count("healthy") == 2


def test_top_learns_all_names_of_a_new_engine(start: Start, asked: Asked, tmp_path: Path) -> None:
    watched = live.Watched(str(tmp_path), [])
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    engine.run(turn("1", session_id="s"))
    looks = [watched.look() for _ in range(2)]
    assert asked.questions == [(engine.path, "status"), (engine.path, "live")]
    shown = [draw({}, look) for look in looks]
    assert [x.count("healthy") for x in shown] == [1, 1]
    assert [x.count("sessions: ") for x in shown] == [0, 1]


def test_top_shows_an_engine_once_it_answers(start: Start, asked: Asked) -> None:
    engine = start()
    asked.hanging.add(engine.path)
    watched = live.Watched("m", engines.choose("m").running)
    (look,) = watched.look().values()
    assert look.title == f"the engine at {engine.path}"
    assert "has not answered since" in draw({}, {engine.path: look})
    asked.hanging.clear()
    (look,) = watched.look().values()
    assert look.title == "m (pid 4711)"
    assert look.status is not None


def test_top_ends_when_the_engine_is_gone_and_says_so(start: Start, run: Run, asked: Asked) -> None:
    asked.gone_after[start().path] = 3  # its status, and two looks at it
    code, out, err = run("top", "--interval", 0.1)
    assert (code, err) == (0, "heterocache: m (pid 4711) has ended\n")
    assert "healthy" in out


def test_the_guides_commands_do_what_it_says(
    start: Start, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    monkeypatch.chdir(tmp_path)
    engine.run(turn("1", session_id="agent-7"))
    engine.run(turn("2", session_id="agent-7", cache_salt="tenant-a"))
    prompt = turn("3", seed=3, cache_salt="tenant-a")
    engine.run(prompt)
    (tmp_path / "ids.json").write_text(json.dumps(prompt.all_token_ids))
    (tmp_path / "prompt.txt").write_text("[1, 2, 3]")  # text needs a tokenizer, which "m" has not
    blocks = re.findall(r"^```bash\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [x for block in blocks for x in block.splitlines() if x.startswith("heterocache")]
    assert len(lines) > 10
    for line in sorted(lines, key=lambda line: " clear " in line):
        code, _, err = run(*shlex.split(line)[1:])
        assert code == (" prompt.txt" in line), f"{line}: {err}"
    assert [engine.stored(x) for x in (prompt, turn("1"))] == [0, 0]
