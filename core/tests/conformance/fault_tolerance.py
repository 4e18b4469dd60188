"""PyTorch's own tests of `reconfigure` over a backend; the file stays as it is.

    python core/tests/conformance/fault_tolerance.py FILE [netfold | gloo] [TEST ...]

FILE: `test/distributed/test_c10d_fault_tolerance.py` of PyTorch's repository, which the wheel lacks, at the commit
of the installed torch (`torch.version.git_version`). Its classes are made by backend; one more is made here.
Tests that ask for what only nccl2 does skip themselves. Exit code: 0 where all passed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest

_FILE, _BACKEND = "NETFOLD_TEST_FILE", "NETFOLD_TEST_BACKEND"
if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    # The ranks import this module again, without its arguments.
    os.environ[_FILE] = os.path.abspath(sys.argv.pop(1))
    os.environ[_BACKEND] = sys.argv.pop(1) if sys.argv[1:2] in (["netfold"], ["gloo"]) else "netfold"

found = importlib.util.spec_from_file_location("fault_tolerance_of_torch", os.environ[_FILE])
assert found is not None and found.loader is not None
theirs = sys.modules[found.name] = importlib.util.module_from_spec(found)
found.loader.exec_module(theirs)

FaultToleranceTest = theirs._make_fault_tolerance_test_class(theirs.FaultToleranceBackend(os.environ[_BACKEND], "cpu"))
# By this name the ranks find it.
FaultToleranceTest.__module__, FaultToleranceTest.__qualname__ = __name__, "FaultToleranceTest"
FaultToleranceTest.__name__ = "FaultToleranceTest"

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *(f"FaultToleranceTest.{name}" for name in sys.argv[1:])], verbosity=2)
