"""A replica that tells routers what they ask: how it names chains, its costs, its tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray.serve.llm.deployment import LLMServer

from examples.ray_serve.internals import TokenizeChatRequest, TokenizeCompletionRequest, config_of
from hetero_connector.engine.api.engines import Engines
from ownership.router.ray_serve.replicas import Answer, routing_stats
from ownership.router.view.checks import PROBES

_COSTS_S = 60.0
"""Costs are learned all the time, and Ray sends each change to everyone who routes."""


class HeteroServer(LLMServer):
    """Ray's server of one replica, with answers to the questions of `OwnerRouter`."""

    _engines: Engines | None = None
    _constant: list[Answer] | None = None
    _costs: Answer | None = None
    _costs_s = 0.0

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray in each `request_routing_stats_period_s`."""
        if self._engines is None:
            self._engines = Engines.of(config_of(self))
        if self._constant is None:
            self._constant = [self._models(), self._pages(), *await self._tokens()]
        if self._costs is None or time.monotonic() - self._costs_s > _COSTS_S:
            costs = await self._told("costs")
            if any("costs" in engine for engine in costs.answer["engines"]):
                self._costs, self._costs_s = costs, time.monotonic()
        known = [] if self._costs is None else [self._costs]
        answers = [*self._constant, *known, await self._told("chain")]
        return {**await super().record_routing_stats(), **routing_stats(answers)}

    async def _told(self, what: str) -> Answer:
        assert self._engines is not None
        engines = await self._engines.ask({"get": what})
        return Answer("GET", f"/v1/heterocache/{what}", None, {"engines": engines})

    def _models(self) -> Answer:
        card = {"id": self._llm_config.model_id, "parent": None}
        return Answer("GET", "/v1/models", None, {"data": [card]})

    def _pages(self) -> Answer:
        """Return the line of vLLM's metrics that says how much its cache holds."""
        cache = config_of(self).cache_config
        labels = f'block_size="{cache.block_size}",num_gpu_blocks="{cache.num_gpu_blocks}"'
        return Answer("GET", "/metrics", None, f"vllm:cache_config_info{{{labels}}} 1.0\n")

    async def _tokens(self) -> list[Answer]:
        """Return this replica's tokens of the prompts by which routers compare their own."""
        found = []
        for _, _, body in PROBES:
            tokens = await self._tokens_of(body)
            if tokens is not None:
                found.append(Answer("POST", "/tokenize", body, {"tokens": tokens}))
        return found

    async def _tokens_of(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens; None if there is no chat template, or it refuses the conversation."""
        kind = TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest
        async for answer in await self.tokenize(kind(**body)):
            tokens = getattr(answer, "tokens", None)
            return None if tokens is None else list(tokens)
        return None
