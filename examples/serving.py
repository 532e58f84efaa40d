"""Start stock vLLM OpenAI servers on a CPU and send them requests, for the demo and the tests.

`Server` owns one server in its own process group, so that `kill()` is a real kill -9 of
the API server, the engine core and its workers together.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from examples.cpu_kernels import PLUGIN_PATH

ENGINE_ENVIRONMENT: Mapping[str, str] = {
    # One thread and no binding: with the default binding on a small shared machine a
    # prefill takes ten times longer and logprobs move between runs.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The settings of an engine on a few CPU cores. vLLM reads them when it is imported."""

_ROOT = str(Path(__file__).resolve().parents[1])
_START_TIMEOUT_S = 420.0
_LOG_TAIL_BYTES = 6000
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def engine_environment() -> dict[str, str]:
    """Return the environment for a process that runs an engine on a CPU.

    It is this process's, with `ENGINE_ENVIRONMENT` and a path where Python finds this repository
    and vLLM finds the CPU kernels.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths += [path for path in (_ROOT, PLUGIN_PATH) if path not in paths]
    return {**os.environ, **ENGINE_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def use_engine_environment() -> None:
    """Set `engine_environment` for engines in this process and in those it starts.

    Call it before vLLM is imported.
    """
    os.environ.update(engine_environment())
    if PLUGIN_PATH not in sys.path:
        sys.path.append(PLUGIN_PATH)


def kv_transfer_config(extra: Mapping[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Return the `--kv-transfer-config` that selects HeteroConnector, with its extra config."""
    return {
        "kv_connector": "HeteroConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra or {}),
        **overrides,
    }


def engine_arguments(model: str) -> dict[str, Any]:
    """Return the engine arguments for a checkpoint of `examples.checkpoints`.

    Blocks are as small as possible. With the default retention interval of 0 the engine's own
    prefix cache keeps no windows inside a prompt, so it would hit nothing there.
    """
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }
    kind = model.split("-")[0]
    # vLLM's `auto` halves a float32 checkpoint to bfloat16.
    arguments["dtype"] = "float32"
    if kind in ("deepseek_v4", "qwen3_next") or model.endswith("-bf16"):
        arguments["dtype"] = "bfloat16"
    if kind == "qwen3_next":
        # The default depends on the CPU, and the tokens of a block depend on it.
        arguments["mamba_ssm_cache_dtype"] = "float32"
    if kind in ("dense", "gemma3", "gptoss", "llama4", "blip2"):
        arguments["block_size"] = 32  # the smallest the CPU attention kernel takes
    if kind in ("gemma3", "gptoss", "deepseek_v4"):
        arguments["prefix_cache_retention_interval"] = 256
    return arguments


@dataclass(frozen=True)
class Reply:
    """One streamed completion."""

    tokens: list[int]
    top_logprobs: list[dict[str, float]]
    """Per generated token: `token_id:N` -> logprob, for the most likely ones."""
    ttft_s: float
    """Seconds from sending the request to the first streamed token."""
    cached_tokens: int | None
    """Prompt tokens that were not computed, local and external; None if it is not reported."""


def logprob_distance(one: Reply, other: Reply) -> float:
    """Return the largest |difference| of a logprob over the steps with the same context.

    Only tokens that both replies report are compared: the whole vocabulary if `num_logprobs` was
    its size. Infinite if there is nothing to compare, or if one of the replies does not report the
    token that the other chose: then it is unknown how far they are apart.
    """
    if not one.tokens or not other.tokens:
        return math.inf
    worst = 0.0
    for step, (a, b) in enumerate(zip(one.top_logprobs, other.top_logprobs, strict=True)):
        shared = a.keys() & b.keys()
        chosen = one.tokens[step], other.tokens[step]
        if not shared >= {f"token_id:{token}" for token in chosen}:
            return math.inf
        worst = max([worst, *(abs(a[token] - b[token]) for token in shared)])
        if chosen[0] != chosen[1]:
            break
    return worst


@dataclass
class Server:
    """The stock server of `model`, a checkpoint directory. Use it as a context manager.

    `kv_transfer`: the connector's configuration; None for a server without a connector.
    `log_path` gets the server's output. `python`: of an environment that has vLLM.
    """

    model: Path
    log_path: Path
    kv_transfer: Mapping[str, Any] | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    python: str = sys.executable
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def group(self) -> int:
        """The process group of the running server, which is its own process id."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start the process without waiting for it."""
        self.port = self.port or free_port()
        environment = engine_environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=environment | dict(self.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> Server:
        """Wait for /health; launch the server first if it was not launched.

        Raises RuntimeError with the end of the log if the server does not start.
        """
        if self._process is None:
            self.launch()
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the server ended at start:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"no /health within {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.1)
        return self

    def command(self) -> list[str]:
        arguments = engine_arguments(self.model.name) | dict(self.engine_args)
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", self.model.name]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # Replies are compared only if they report equally many cached tokens.
        command += ["--enable-prompt-tokens-details"]
        for name, value in arguments.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                command.append(flag if value else f"--no-{flag[2:]}")
            else:
                command += [flag, str(value)]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return command

    def complete(
        self, prompt: Sequence[int], max_tokens: int = 16, num_logprobs: int = 20, **request: Any
    ) -> Reply:
        """Complete a prompt of token ids greedily, streamed from /v1/completions."""
        body = {
            "model": self.model.name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": num_logprobs,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **request,
        }
        sent = time.perf_counter()
        ttft_s: float | None = None
        tokens: list[int] = []
        top_logprobs: list[dict[str, float]] = []
        cached_tokens: int | None = None
        for event in self._stream("/v1/completions", body):
            for choice in event.get("choices", ()):
                if ttft_s is None:
                    ttft_s = time.perf_counter() - sent
                logprobs = choice.get("logprobs") or {}
                tokens += [int(name.partition(":")[2]) for name in logprobs.get("tokens", ())]
                top_logprobs += logprobs.get("top_logprobs", ())
            details = (event.get("usage") or {}).get("prompt_tokens_details")
            if details is not None:
                cached_tokens = details["cached_tokens"]
        if ttft_s is None:
            raise RuntimeError(f"the server streamed no token:\n{self.log_tail()}")
        return Reply(tokens, top_logprobs, ttft_s, cached_tokens)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON object and return the answer."""
        with self._send(path, json.dumps(body).encode()) as response:
            return json.load(response)

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by `name{labels}` as printed."""
        lines = self._get("/metrics").splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each time series of a metric."""
        return [
            (dict(_LABEL.findall(key)), value)
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name
        ]

    def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Empty the engine's own prefix cache; the connector's store too if `external`."""
        query = "?reset_external=true" if external else ""
        self._send(f"/reset_prefix_cache{query}", b"").read()

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL. Idempotent."""
        self._signal(signal.SIGKILL)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Send SIGTERM, wait, kill what is left after `timeout_s`; return the exit status."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        code = process.poll()
        self.kill()
        return -signal.SIGKILL if code is None else code

    def log_tail(self) -> str:
        """Return the end of the server's output."""
        return self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # start_new_session: its pid is the group's
        self._process.wait()
        self._process = None

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def _send(self, path: str, body: bytes) -> Any:
        request = urllib.request.Request(
            self.url + path, data=body, headers={"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=300)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from error

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._send(path, json.dumps(body).encode()) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)


def stop_servers_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that its servers are stopped.

    Servers run in sessions of their own, so they do not get the signal themselves.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def free_port() -> int:
    """Return a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
