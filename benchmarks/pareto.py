"""Compare points with the Pareto front of others: two costs, smaller is better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Point = tuple[float, float]


def front(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other beats, by the first cost, without duplicates."""
    kept: list[Point] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def hull(points: Iterable[Point]) -> list[Point]:
    """Return the front's lower convex hull: the costs that mixtures of the points reach."""
    kept: list[Point] = []
    for point in front(points):
        while len(kept) > 1 and _is_above(kept[-1], kept[-2], point):
            kept.pop()
        kept.append(point)
    return kept


def is_beaten(point: Point, others: Iterable[Point]) -> bool:
    """Return True if another point costs no more of either and less of one."""
    return any(x <= point[0] and y <= point[1] and (x, y) != point for x, y in others)


def over_hull(point: Point, others: Sequence[Point]) -> float:
    """Return the second cost over the hull's at the same first cost: at most 1 on or under it.

    0 if the first cost is smaller than that of all others.
    """
    line = hull(others)
    if point[0] < line[0][0]:
        return 0.0
    after = next((i for i, p in enumerate(line) if p[0] > point[0]), len(line))
    if after == len(line):
        level = line[-1][1]
    else:
        (x0, y0), (x1, y1) = line[after - 1], line[after]
        level = y0 + (y1 - y0) * (point[0] - x0) / (x1 - x0)
    if level:
        return point[1] / level
    return 1.0 if point[1] == 0.0 else float("inf")


def _is_above(point: Point, start: Point, end: Point) -> bool:
    """Return True if the point lies on or above the line from `start` to `end`."""
    (x0, y0), (x, y), (x1, y1) = start, point, end
    return (y - y0) * (x1 - x0) >= (y1 - y0) * (x - x0)
