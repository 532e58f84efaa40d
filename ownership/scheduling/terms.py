"""What a placement is predicted to cost, term by term."""

from __future__ import annotations

from typing import NamedTuple


class PlacementTerms(NamedTuple):
    """Seconds of one route to serve a step. They add up:

    C = T_queue + T_compute + T_network + T_restore + lambda M_HBM + mu I_decode + kappa M_copies

    where T_compute is `compute_s + decode_s`.
    """

    queue_s: float
    """Until the tokens scheduled ahead are computed and there are pages for the request."""
    compute_s: float
    """Computing what of the prompt is not restored."""
    network_s: float
    """Reading state from other workers, as far as the queue does not hide it."""
    restore_s: float
    """From SSD to DRAM and from DRAM to pages, as far as nothing hides it."""
    decode_s: float
    """Decoding the expected tokens in the batch that it joins."""
    hbm_s: float
    """lambda M_HBM: price of the KV pages held meanwhile."""
    interference_s: float
    """mu I_decode: price of the time by which running decodes are late."""
    copy_s: float
    """kappa M_copies: price of state that is held twice from then on."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token: without decoding and without what others pay."""
        return self.queue_s + self.compute_s + self.network_s + self.restore_s

    @property
    def total_s(self) -> float:
        """What is compared."""
        return sum(self)
