"""`netfold.elastic` in Ray's actors: one is killed, the others go on, and a new one joins."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from environment import MARK, processes_of, settings, version_of, why_missing
from sources import HELPERS

pytestmark = pytest.mark.ecosystem

HERE = Path(__file__).parent
DEADLINE_S = 540.0


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("how", ["restart", "anew"])
def test_a_new_actor_takes_the_place_of_a_killed_one(how: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    version = version_of("ray")
    line = "max_restarts, max_task_retries" if how == "restart" else "a new actor with the same variables"
    row = {"framework": "netfold.elastic in Ray", "version": version or "-", "line": line}
    request.node.user_properties.extend(row.items())
    if version is None:
        # tools/ecosystem has noted why Ray could not be installed.
        pytest.skip(reason=why_missing("ray"))
    with settings() as env:
        env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "elastic"), HELPERS])
        process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_elastic.py"), str(tmp_path), how],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            for each in processes_of(env[MARK]):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            process.wait()
    assert process.returncode == 0 and f"{how}: the new rank has joined" in text, text
