"""The benchmark of host memory still measures what it says."""

from benchmarks import host_memory
from hetero_connector.units import MIB


def test_a_small_run_has_every_figure() -> None:
    figures, text = host_memory.measure(2, 32 * MIB, repeats=1)
    assert all(figure > 0 for figure in figures.values())
    for name in ("reserve_4k", "reserve_huge", "checksum_4_mib", "checksum_16_mib"):
        assert name in figures
        assert name in text
