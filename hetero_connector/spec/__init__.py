"""The attention spec registry: the KV state that a model keeps, and what a restore needs of it.

Owns the state types (`state_types`), `LayerSpec` and `ModelSpec` (`model_spec`), and the specs of
known models computed from a `config.json` alone (`from_config`, `presets`). Imports only `errors`.
To add a state type, extend `StateType`, give it a `Family`, and map it in
`engine/startup/geometry.py`.
"""

from hetero_connector.spec.model_spec import LayerSpec, ModelSpec
from hetero_connector.spec.state_types import Family, RestoreRule, StateType

__all__ = ["Family", "LayerSpec", "ModelSpec", "RestoreRule", "StateType"]
