"""sitecustomize of every process of a sanitized run: netfold comes from the sanitized build."""

import sys
from pathlib import Path

# The editable install answers for `netfold` before sys.path is asked.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]

import netfold._native  # noqa: E402

assert Path(netfold._native.__file__).is_relative_to(Path(__file__).parent), netfold._native.__file__
