"""Series of workers that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownership.router.metrics import RouterMetrics


def use(metrics: RouterMetrics, name: str) -> None:
    metrics.in_flight.labels(name).inc()
    metrics.retried.labels(name).inc()
    metrics.cut.labels(name).inc()
    metrics.prefills.labels(name, "failed").inc()


def test_a_worker_that_has_left_has_no_series_once_nothing_of_it_is_under_way() -> None:
    metrics = RouterMetrics()
    metrics.show_workers({"a": True, "unused": True, "c": True})
    use(metrics, "a")
    use(metrics, "c")
    metrics.show_workers({"c": True})
    shown = metrics.text().decode()
    assert "unused" not in shown
    assert 'worker_up{worker="a"}' not in shown
    assert 'in_flight{worker="a"} 1.0' in shown
    assert 'cut_total{worker="a"} 1.0' in shown
    metrics.in_flight.labels("a").dec()
    metrics.show_workers({"c": True, "d": False})
    assert '"a"' not in metrics.text().decode()
    assert metrics.text().decode().count('"c"') >= 5
    metrics.show_workers({"a": True})
    use(metrics, "a")
    assert 'cut_total{worker="a"} 1.0' in metrics.text().decode(), "it begins again"


@pytest.mark.filterwarnings("error")
def test_with_several_processes_no_series_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client library cannot, and warns."""
    metrics = RouterMetrics()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics.show_workers({"a": True})
    metrics.show_workers({})
