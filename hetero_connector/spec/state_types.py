"""The kinds of KV state that a model can have, and what a restore needs of each."""

from __future__ import annotations

from enum import StrEnum


class Family(StrEnum):
    """The two families of state, by what a resume at a boundary needs."""

    PREFIX = "prefix"
    """Prefix-proportional: needed for every token before the boundary."""
    BOUNDARY = "boundary"
    """Boundary state: needed only at the boundary itself (a window, a tail, a recurrent state)."""


class RestoreRule(StrEnum):
    """The tokens whose state must be in place before the engine may resume at a boundary."""

    EVERY_TOKEN = "every_token"
    """State of every token in [0, boundary)."""
    WINDOW = "window"
    """State of the last `boundary_tokens` tokens before the boundary."""
    CHUNK_START = "chunk_start"
    """State of the tokens since the last multiple of `window` (chunked local attention)."""
    AT_BOUNDARY = "at_boundary"
    """One state, taken exactly at the boundary (Mamba, GDN)."""
    NOTHING = "nothing"
    """None: per-request scratch that the engine rebuilds by itself."""


class StateType(StrEnum):
    """One kind of KV state. The value is the name in metrics, journals and plans."""

    DENSE_KV = "dense_kv"
    MLA_LATENT = "mla_latent"
    COMPRESSED_CSA_MAIN = "compressed_csa_main"
    COMPRESSED_CSA_INDEX = "compressed_csa_index"
    COMPRESSED_HCA = "compressed_hca"
    WINDOW_SWA = "window_swa"
    TAIL_STATE = "tail_state"
    RECURRENT = "recurrent"
    CHUNKED_LOCAL = "chunked_local"

    # Enum's own hash is a Python function; state types key every hot dictionary.
    __hash__ = str.__hash__

    @property
    def family(self) -> Family:
        """PREFIX if the state grows with the prefix, BOUNDARY if it belongs to one boundary."""
        return Family.BOUNDARY if self in _BOUNDARY_TYPES else Family.PREFIX

    @property
    def position(self) -> int:
        """Its index in the order of declaration."""
        return _POSITIONS[self]


_POSITIONS = {state_type: at for at, state_type in enumerate(StateType)}

_BOUNDARY_TYPES = frozenset(
    {
        StateType.WINDOW_SWA,
        StateType.TAIL_STATE,
        StateType.RECURRENT,
        StateType.CHUNKED_LOCAL,
    }
)
