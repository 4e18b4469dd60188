"""pytest on the sanitized build: take netfold from NETFOLD_SANITIZED_SITE instead of the editable install."""

import os
import sys

import pytest

site = os.environ["NETFOLD_SANITIZED_SITE"]
# The editable install answers for `netfold` before sys.path is asked.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, site)

import netfold._native  # noqa: E402

assert netfold._native.__file__.startswith(site), f"not the sanitized build: {netfold._native.__file__}"
# Ranks that a test spawns import this file too, and with it the sanitized build; they are not to run the tests.
if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
