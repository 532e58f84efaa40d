"""Smaller agent sessions, for tests."""

from __future__ import annotations

from benchmarks.agent_sessions import Session, Turn


def scaled(session: Session, factor: int, max_turns: int) -> Session:
    """Return the first turns with every `factor`-th block, for an engine of short prompts.

    Blocks are dropped by their id, so prompts still share what they shared before.
    """

    def turn(full: Turn) -> Turn:
        blocks = full.blocks[full.blocks % factor == 0]
        unfinished = full.prompt_tokens - len(full.blocks) * session.block_tokens
        prompt_tokens = len(blocks) * session.block_tokens + unfinished // factor
        return Turn(full.at_s, blocks, max(1, prompt_tokens), max(1, full.output_tokens // factor))

    return Session(session.name, tuple(map(turn, session.turns[:max_turns])), session.block_tokens)
