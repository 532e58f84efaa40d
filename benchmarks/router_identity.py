"""Measure what the identity of prompts costs a router, for agent sessions that grow to 100k tokens.

Each turn is read, rendered, tokenised and named by the router's `PromptIdentity`, which knows the
turn before. In the same run the last turn is also tokenised and named from its beginning, as every
server does. All on one thread, of which the CPU time counts. The tokenizer is trained on this
repository's texts, with the pattern of Llama 3. What a directory's lookup costs is in
`benchmarks.directory`. Only a run with the default options writes results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.measure import is_default, machine_line, publish, rounded, table
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from ownership.router.identity import ChainCache, ChainNaming, ModelTokenizer, PromptIdentity
from ownership.router.identity.cuts import Cuts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK_TOKENS = 256
KIB = 1_024
PATH = "/v1/chat/completions"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{%- for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant\n{%- endif %}"
)
_SPECIAL = ["<|start|>", "<|end|>"]


def train_tokenizer() -> ModelTokenizer:
    """Return a byte-level BPE tokenizer with 16,000 tokens."""
    tokenizer = _trained()
    cuts = Cuts.of(json.loads(tokenizer.to_str()), _SPECIAL)
    return ModelTokenizer(tokenizer, cuts, templates={"default": TEMPLATE})


def write_tokenizer(folder: Path) -> None:
    """Write the same tokenizer, with its chat template, as a model's folder has it."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=_trained())  # type: ignore[no-untyped-call]
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def _trained() -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    added = [AddedToken(x, normalized=False, special=True) for x in _SPECIAL]
    tokenizer.add_special_tokens(added)
    return tokenizer


def texts() -> list[str]:
    """Return this repository's own texts and sources."""
    root = Path(__file__).parents[1]
    paths = sorted([*root.glob("docs/**/*.md"), *root.glob("hetero_connector/**/*.py")])
    return [path.read_text() for path in paths]


class Session:
    """One agent's conversation. Each turn adds an answer and the output of a tool."""

    def __init__(self, rng: random.Random, lines: list[str]) -> None:
        self._rng = rng
        self._lines = lines
        self.messages = [{"role": "system", "content": self._text(8_000)}]

    def add_turn(self, characters: int) -> bytes:
        """Return the body of the next turn's request."""
        self.messages.append({"role": "assistant", "content": self._text(characters // 4)})
        self.messages.append({"role": "user", "content": self._text(characters * 3 // 4)})
        return msgspec.json.encode({"model": "m", "messages": self.messages, "stream": True})

    def _text(self, characters: int) -> str:
        at, parts, size = self._rng.randrange(len(self._lines)), list[str](), 0
        while size < characters:
            parts.append(self._lines[at % len(self._lines)])
            size += len(parts[-1])
            at += 1
        return "".join(parts)[:characters]


def measure(num_tokens: int, turns: int, sessions: int) -> dict[str, float]:
    """Return the figures. Times of the last turn are medians of all sessions.

    Raises RuntimeError if a chain is not that of the whole text.
    """
    tokenizer, lines = train_tokenizer(), "".join(texts()).splitlines(keepends=True)
    naming = ChainNaming(ChainHasher(b"model", CHUNK_TOKENS).root, CHUNK_TOKENS)
    cache = ChainCache(1 << 30)
    identity = PromptIdentity(tokenizer, cache)
    rows, parts, full_s, last_s = [], [], [], []
    for seed in range(sessions):
        session = Session(random.Random(seed), lines)
        known = 0
        for turn in range(turns):
            body = session.add_turn(int(num_tokens * 4.2 / turns * (0.2 + 1.6 * (turn % 2))))
            begun_s = time.thread_time()
            request = msgspec.json.decode(body)
            decoded_s = time.thread_time()
            [prompt] = identity.read(PATH, request)
            rendered_s = time.thread_time()
            named = identity.name(prompt, naming).chain
            ended_s = time.thread_time()
            assert named is not None
            if turn:
                rows.append((known, named.num_tokens - known, ended_s - begun_s))
            known = named.num_tokens
        parts.append((decoded_s - begun_s, rendered_s - decoded_s, ended_s - rendered_s))
        last_s.append(ended_s - begun_s)
        begun_s = time.thread_time()
        keys = _from_the_beginning(tokenizer, prompt.text or "", naming)
        full_s.append(time.thread_time() - begun_s)
        if named is None or list(named.keys) != keys:
            raise RuntimeError("the chain is not that of the whole text")
    old, new, seconds = np.array(rows).T
    columns = np.stack([np.ones_like(old), old, new], axis=1)
    fixed_s, old_s, new_s = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    turn_s = statistics.median(last_s)
    decode_s, render_s, name_s = (statistics.median(x) for x in zip(*parts, strict=True))
    whole_s = statistics.median(full_s) + decode_s + render_s
    return {
        "tokens": known,
        "new_tokens_of_the_last_turn": int(new[-1]),
        "turn_ms": turn_s * 1e3,
        "decode_json_ms": decode_s * 1e3,
        "render_ms": render_s * 1e3,
        "name_ms": name_s * 1e3,
        "whole_ms": whole_s * 1e3,
        "times_cheaper": whole_s / turn_s,
        "fixed_us": fixed_s * 1e6,
        "us_per_old_token": old_s * 1e6,
        "us_per_new_token": new_s * 1e6,
        "whole_us_per_token": statistics.median(full_s) / known * 1e6,
        "kib_per_session": cache.size_bytes / sessions / KIB,
    }


def _from_the_beginning(tokenizer: ModelTokenizer, text: str, naming: ChainNaming) -> list[bytes]:
    """Tokenise and name the whole text, as an engine does."""
    chain = RequestChain(naming.hasher)
    chain.extend(tokenizer.tokens(text))
    return [chunk.key for chunk in chain.chunks()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_identity")
    parser.add_argument("--tokens", type=int, default=100_000, help="a session's tokens at its end")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    figures = measure(arguments.tokens, arguments.turns, arguments.sessions)
    rows = [[name, f"{figure:,.4g}"] for name, figure in figures.items()]
    text = f"{machine_line()}\n\n{table(['figure', 'value'], rows)}"
    write = is_default(parser, arguments, free=("json",))
    publish("router_identity", text, rounded(figures), {}, as_json=arguments.json, write=write)


if __name__ == "__main__":
    main()
