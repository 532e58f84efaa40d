"""Tests of what is in `deploy`.

`make test-prometheus` runs those with a real Prometheus, `make test-envoy` those with a real Envoy.
"""

from __future__ import annotations

import shutil

collect_ignore: list[str] = []
if shutil.which("promtool") is None or shutil.which("prometheus") is None:
    collect_ignore.append("test_prometheus_server.py")
if shutil.which("envoy") is None:
    collect_ignore.append("test_envoy.py")
