"""The Hypothesis profiles of these tests. HYPOTHESIS_PROFILE=thorough runs 30 times as many examples."""

import os

from hypothesis import HealthCheck, settings

# Examples take virtual time, so a slow machine is no failure. CI runs the same examples every time, so that a failure
# comes from the change; elsewhere each run draws new examples.
_COMMON = {
    "deadline": None,
    "derandomize": bool(os.environ.get("CI")),
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("netfold", max_examples=100, **_COMMON)
settings.register_profile("thorough", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "netfold"))
