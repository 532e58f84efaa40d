"""Unexpected errors inside vLLM's hooks become cache misses instead of ending the engine.

An exception that leaves a hook ends the engine for every request. So the connector drops its work
of that step and counts the error. It logs the first one with its traceback, since it is a defect.
Errors at start are raised. See `docs/internals/hooks.md` for each hook.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from hetero_connector.errors import LoadLostError
from hetero_connector.metrics import Recorder

logger = logging.getLogger("vllm.heterocache")

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class HookErrors:
    """Counts unexpected errors by hook and logs the first of each."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def count(self, hook: str, error: Exception) -> None:
        self._recorder.add("heterocache_hook_errors", hook=hook)
        with self._lock:
            if hook in self._logged:
                return
            self._logged.add(hook)
        logger.error(
            "an error in %s is counted as a miss, this one and later ones "
            "(heterocache_hook_errors); please report it",
            hook,
            exc_info=error,
        )


def is_a_miss(answer: Callable[[], Any]) -> Callable[[_Hook], _Hook]:
    """Decorate a hook: if it raises, count the error and return `answer()` instead.

    Only a `LoadLostError` is raised on. The hook's class has its `HookErrors` as `_errors`.
    """

    def decorate(hook: _Hook) -> _Hook:
        @wraps(hook)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except LoadLostError:
                raise
            except Exception as error:
                self._errors.count(hook.__name__, error)
                return answer()

        return cast(_Hook, guarded)

    return decorate
