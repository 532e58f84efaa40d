"""Attention Spec Registry: which KV state a model keeps, and what restoring it needs.

Owns the state types, `LayerSpec` and `ModelSpec`, and presets computed from a
`config.json` alone. Imports nothing of the package but `errors`. To add a state type,
extend `StateType`, give it a `Family`, and map it in `engine/startup/geometry.py`.
"""

from hetero_connector.spec.model_spec import LayerSpec, ModelSpec
from hetero_connector.spec.state_types import Family, RestoreRule, StateType

__all__ = ["Family", "LayerSpec", "ModelSpec", "RestoreRule", "StateType"]
