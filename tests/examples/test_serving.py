"""The client's reading of what a server says, on a fake server."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from examples.demo import Outcome
from examples.serving import Reply, Server, logprob_distance
from tests.waiting import until

METRICS = """# HELP heterocache_bytes Useful bytes stored.
heterocache_bytes{engine="0",state_type="dense_kv",tier="dram"} 4096.0
heterocache_bytes{engine="0",state_type="dense_kv",tier="ssd"} 2.5e+06
heterocache_bytes_other{tier="ssd"} 1.0
"""
EVENTS = [
    {"choices": [{"logprobs": {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5}]}}]},
    {"choices": [{"logprobs": {"tokens": ["token_id:9"], "top_logprobs": [{"token_id:9": -0.1}]}}]},
    {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 256}}},
]


class _Handler(BaseHTTPRequestHandler):
    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._reply(METRICS.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        lines = [f"data: {json.dumps(event)}\n\n" for event in EVENTS]
        self._reply("".join([*lines, "data: [DONE]\n\n"]).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    fake = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    log = tmp_path / "log"
    log.write_text("started")
    yield Server(tmp_path / "dense", log, port=fake.server_port)
    fake.shutdown()
    thread.join()
    fake.server_close()


def test_a_reply_has_its_tokens_logprobs_and_cached_tokens(server: Server) -> None:
    reply = server.complete([1, 2, 3], 2)
    assert reply.tokens == [7, 9]
    assert reply.top_logprobs == [{"token_id:7": -0.5}, {"token_id:9": -0.1}]
    assert reply.cached_tokens == 256
    assert reply.ttft_s > 0


def test_series_are_those_of_the_metric_only(server: Server) -> None:
    found = {labels["tier"]: value for labels, value in server.series("heterocache_bytes")}
    assert found == {"dram": 4096.0, "ssd": 2.5e6}


def test_a_server_that_ends_at_start_shows_its_log(tmp_path: Path) -> None:
    server = Server(tmp_path / "no-such-model", tmp_path / "log")
    server.command = lambda: ["sh", "-c", "echo no such model; exit 3"]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no such model"):
        server.start()


def test_kill_ends_the_whole_process_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    server = Server(tmp_path / "dense", tmp_path / "log")
    script = f"sleep 60 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"
    server.command = lambda: ["sh", "-c", script]  # type: ignore[method-assign]
    server.launch()
    until(pid_file.exists)
    child = int(pid_file.read_text())
    server.kill()
    until(lambda: not _is_running(child))  # the signal is sent; dying may take a moment


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def _reply(logprobs: list[dict[str, float]], tokens: list[int], ttft_s: float = 0.1) -> Reply:
    return Reply(tokens, logprobs, ttft_s, 256)


def _first(logprob: float) -> dict[str, float]:
    """Return the logprobs of two tokens, of which the first has this one."""
    return {"token_id:1": logprob, "token_id:2": -3.0}


def test_delta_stops_where_the_contexts_part() -> None:
    one = _reply([_first(-1.0), _first(-1.0), _first(-1.0)], [1, 1, 1])
    same = _reply([_first(-1.0), _first(-1.5), _first(-9.0)], [1, 2, 1])
    assert logprob_distance(one, same) == 0.5


def test_answers_that_cannot_be_compared_are_infinitely_far_apart() -> None:
    one = _reply([_first(-0.1)], [1])
    assert logprob_distance(one, _reply([{"token_id:8": -0.1}], [8])) == math.inf
    shares_an_unlikely_token = {"token_id:8": -0.1, "token_id:2": -3.0}
    assert logprob_distance(one, _reply([shares_an_unlikely_token], [8])) == math.inf
    assert logprob_distance(_reply([], []), _reply([], [])) == math.inf


def test_a_tie_that_falls_the_other_way_is_no_difference() -> None:
    assert logprob_distance(_reply([_first(-3.0)], [1]), _reply([_first(-3.0)], [2])) == 0.0


def test_a_wrong_missing_or_slow_restore_is_a_problem_of_the_demo() -> None:
    good, wrong = _reply([_first(-1.0)], [1]), _reply([_first(-1.1)], [1])
    slow = _reply([_first(-1.0)], [1], ttft_s=1.0)
    outcome = Outcome("dense")
    outcome.replies = {"cold": [slow], "local": [good], "dram": [good], "ssd": [good]}
    outcome.restored = {"dram": {"dense_kv": 256}, "ssd": {"dense_kv": 256}}
    assert outcome.problems() == []
    outcome.restored["ssd"] = {}
    outcome.replies["dram"] = [wrong]
    assert len(outcome.problems()) == 2
    outcome.replies["ssd"] = [slow]
    assert len(outcome.problems()) == 3
