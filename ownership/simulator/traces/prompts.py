"""From block ids as recorded to ids that name prefixes."""

from __future__ import annotations

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import Line
from ownership.simulator.traces.prefix_tree import PrefixTree


class PromptReader:
    """Checks and renames the prompts of one id space.

    Recordings name blocks by their prefix, by their content, or do not say. Renamed by their place
    in a radix tree they name prefixes in every case, which is what `BlockRuns` promises.
    """

    def __init__(self, block_tokens: int, first_id: int = 0) -> None:
        self._block_tokens = block_tokens
        self._tree = PrefixTree(first_id)

    @property
    def next_id(self) -> int:
        """Greater than every id handed out."""
        return self._tree.next_name

    def blocks(self, recorded: BlockRuns, input_tokens: int, line: Line, field: str) -> BlockRuns:
        """The prompt under its new ids.

        Raises:
            TraceError: a prompt of `input_tokens` does not have that many blocks.
        """
        size, have = self._block_tokens, recorded.num_blocks
        if not input_tokens - size < have * size < input_tokens + size:
            problem = f"{have} blocks of {size} tokens do not make a prompt of {input_tokens}"
            raise line.error(problem, field)
        return self._tree.add(recorded).names
