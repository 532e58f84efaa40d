"""Ray's private modules, imported here alone: they move from release to release."""

from __future__ import annotations

from typing import Any

RAY_VERSION = "2.60.0"
INSTALL = f'pip install "ray[serve]=={RAY_VERSION}" pyarrow jsonref'
"""Not `ray[llm]`, which brings a CUDA build of another vLLM."""

try:
    import ray
except ImportError as error:
    raise ImportError(f"this example needs Ray: {INSTALL}") from error
if ray.__version__ != RAY_VERSION:
    raise ImportError(
        f"this example is made for Ray {RAY_VERSION} and found {ray.__version__}: {INSTALL}. "
        "With another release check the imports in examples/ray_serve/internals.py"
    )

from ray.llm._internal.serve.core.configs.openai_api_models import (  # noqa: E402
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (  # noqa: E402
    BaseConnectorBackend,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import (  # noqa: E402
    KVConnectorBackendFactory,
)

__all__ = [
    "RAY_VERSION",
    "BaseConnectorBackend",
    "KVConnectorBackendFactory",
    "TokenizeChatRequest",
    "TokenizeCompletionRequest",
    "clamp_request_to_single_token",
    "config_of",
]


def config_of(server: Any) -> Any:
    """Return vLLM's configuration of a replica whose engine has started."""
    return server.engine._engine_client.vllm_config
