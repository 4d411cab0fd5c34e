"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# On a busy machine an example may take any time: how long one takes is no property of the code.
settings.register_profile("backhaul", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("backhaul")
