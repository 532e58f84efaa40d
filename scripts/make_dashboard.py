"""Write the Grafana dashboards in `deploy/grafana`: one of engines, one of routers.

    python -m scripts.make_dashboard

Panels are declared in `dashboard_panels`, because Grafana's JSON says each of them in fifty lines.
A test fails if a file differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from scripts.dashboard_panels import OF_ENGINES, OF_ROUTERS, Panel

FOLDER = Path(__file__).parents[1] / "deploy/grafana"
_WIDTH, _HEIGHT = 24, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Dashboard(NamedTuple):
    """One dashboard, in a file of its own."""

    name: str
    title: str
    about: str
    selected: str
    """The labels that its variables select."""
    variables: Sequence[dict[str, Any]]
    rows: Mapping[str, Sequence[Panel]]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json"

    def queries(self) -> list[str]:
        """Return every query of its panels."""
        panels = [panel for row in self.rows.values() for panel in row]
        return [query.full(self.selected) for panel in panels for query in panel.queries]

    def as_json(self) -> dict[str, Any]:
        """Return the dashboard as Grafana imports it."""
        numbers, panels, at_y = count(1), list[dict[str, Any]](), 0
        for title, row in self.rows.items():
            place = {"h": 1, "w": _WIDTH, "x": 0, "y": at_y}
            panels.append({"id": next(numbers), "type": "row", "title": title, "gridPos": place})
            at_x, at_y = 0, at_y + 1
            for panel in row:
                if at_x + panel.width > _WIDTH:
                    at_x, at_y = 0, at_y + _HEIGHT
                place = {"h": _HEIGHT, "w": panel.width, "x": at_x, "y": at_y}
                made = _panel(panel, self.selected)
                panels.append({"id": next(numbers), "gridPos": place, **made})
                at_x += panel.width
            at_y += _HEIGHT
        return {
            "uid": self.name,
            "title": self.title,
            "tags": ["vllm", "kv-cache"],
            "description": self.about,
            "schemaVersion": 39,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_CHOICE_OF_PROMETHEUS, *self.variables]},
            "annotations": {"list": []},
            "panels": panels,
        }


_CHOICE_OF_PROMETHEUS = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a choice of several values, which a query lists."""
    return {
        "type": "query",
        "datasource": _DATASOURCE,
        "multi": True,
        "includeAll": True,
        "refresh": 2,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
        "name": name,
        "label": label,
        "query": query,
    }


DASHBOARDS = (
    Dashboard(
        "heterocache",
        "HeteroCache",
        "Restored KV state: its use, its tiers, and the health of both.",
        'model_name=~"$model", instance=~"$instance"',
        (
            _variable("model", "Model", "label_values(heterocache_info, model_name)"),
            _variable(
                "instance",
                "Server",
                'label_values(heterocache_info{model_name=~"$model"}, instance)',
            ),
        ),
        OF_ENGINES,
    ),
    Dashboard(
        "heterocache-router",
        "HeteroCache router",
        "Requests through `heterocache router`: answers, placements, workers.",
        'instance=~"$instance"',
        (_variable("instance", "Router", "label_values(heterocache_router_queued, instance)"),),
        OF_ROUTERS,
    ),
)


def _panel(panel: Panel, selected: str) -> dict[str, Any]:
    is_table = panel.kind == "table"
    defaults: dict[str, Any] = {"unit": panel.unit_shown, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
        fill = 40 if panel.is_stacked else 8
        defaults["custom"] = {"stacking": stacking, "fillOpacity": fill, "showPoints": "never"}
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": query.full(selected),
                "legendFormat": query.legend,
                **({"format": "table", "instant": True} if is_table else {}),
            }
            for number, query in enumerate(panel.queries)
        ],
    }
    if panel.kind == "stat":
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    elif is_table:
        hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    else:
        made["options"] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    return made


if __name__ == "__main__":
    for written in DASHBOARDS:
        written.path.write_text(json.dumps(written.as_json(), indent=2) + "\n")
