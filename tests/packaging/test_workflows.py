""".github: checked by GitHub's own schemas and by zizmor, as in `make check`, and by further rules."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import load
import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"the group dev of pyproject.toml has {name}"
    return found


def run(*command: str) -> None:
    ended = load.run(command, 120, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def jobs() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every workflow's name, the workflow, and a job of it."""
    yaml = pytest.importorskip("ruamel.yaml", reason="ruamel.yaml, which reads workflows, comes with check-jsonschema")
    texts = {path.name: yaml.YAML(typ="safe").load(path.read_text()) for path in WORKFLOWS}
    return [(name, text, job) for name, text in texts.items() for job in text["jobs"].values()]


def test_workflows_match_githubs_schema() -> None:
    check = tool("check-jsonschema")
    run(check, "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    run(check, "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")


def test_zizmor_finds_no_hole_in_the_workflows() -> None:
    run(tool("zizmor"), "--offline", ".github")


def test_every_action_is_pinned_by_commit_with_its_version_beside() -> None:
    uses = [line for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert uses
    for line in uses:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_one_action_has_one_commit_everywhere() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    pins = set(re.findall(r"uses: ([\w./-]+)@([0-9a-f]{40}) # (v\S+?);?(?: |$)", text, re.M))
    assert len({name for name, _, _ in pins}) == len(pins), pins


def test_every_job_has_a_timeout_and_explicit_permissions() -> None:
    for name, workflow, job in jobs():
        assert job["timeout-minutes"] <= 90, name
        assert "concurrency" in workflow, name
        granted = workflow["permissions"]
        assert granted in ({}, {"contents": "read"}), f"{name} grants {granted} to all its jobs"


def test_repository_commands_in_workflows_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for name, _, job in jobs():
        for step in job["steps"]:
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "").split("apt-get")[0]):
                assert target in targets, f"{name} runs make {target}"
    assert (ROOT / ".ci" / "run").exists()
