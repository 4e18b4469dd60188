"""Hypothesis as these tests use it. HYPOTHESIS_PROFILE=thorough hunts 30 times longer."""

import os

from hypothesis import HealthCheck, settings

# Examples take virtual time, not real time: a slow machine is no failure. In CI the same examples every time, so that
# a red build is about the change; at a desk new ones, so that there is a hunt.
_COMMON = {
    "deadline": None,
    "derandomize": bool(os.environ.get("CI")),
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("netfold", max_examples=100, **_COMMON)
settings.register_profile("thorough", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "netfold"))
