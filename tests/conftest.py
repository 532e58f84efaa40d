"""Settings of every test."""

from hypothesis import HealthCheck, settings

# A busy machine is slow, not wrong: only the examples decide.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
