"""Forgetting one artifact, or a chain as far as nothing else goes through it.

A private part of `Catalog`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.loads import Loads
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.tiers import Tiers


def forget_up_from(
    tiers: Tiers, loads: Loads, nodes: Sequence[Node], limit: int
) -> tuple[int, Sequence[Node]]:
    """Forget up to `limit` chunks: each of `nodes`, and those before it.

    A chunk stays if a session uses it, a pin keeps it or another chunk follows it, and all before
    it do then.
    Return the number of chunks, and from where to go on. Restores that are under way end
    harmlessly.
    """
    forgotten = 0
    for index, last in enumerate(nodes):
        node: Node | None = last
        while node is not None and node.parent is not None:
            if forgotten == limit:
                return forgotten, (node, *nodes[index + 1 :])
            above = node.parent
            if tiers.index.nodes.get(node.key) is node:  # else it went with what followed it
                if node.users or node.num_children or node in tiers.timed_pins:
                    break
                forget_node(tiers, loads, node)
                forgotten += 1
            node = above
    return forgotten, ()


def forget_node(tiers: Tiers, loads: Loads, node: Node) -> None:
    """Forget all artifacts of a chunk."""
    for artifact in list(node.artifacts.values()):
        forget(tiers, loads, artifact)


def forget(tiers: Tiers, loads: Loads, artifact: Artifact) -> None:
    """Forget one artifact. Restores that wait for it go without."""
    load = loads.by_artifact.get(artifact)
    if load is not None:
        loads.disown(load, Failure.GONE)
    tiers.forget(artifact)
    if load is not None:
        loads.withdraw(load)
