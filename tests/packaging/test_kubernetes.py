"""The manifests of docs/how-to/kubernetes.md: what they set is what netfold reads. No cluster is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from netfold.bootstrap.launchers import placement
from netfold.cli import app
from netfold.elastic.members import meeting_at_store

DOCS = Path(__file__).parents[2] / "docs"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifests() -> list[Any]:
    yaml = pytest.importorskip("ruamel.yaml", reason="ruamel.yaml, which reads manifests, comes with check-jsonschema")
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "how-to" / "kubernetes.md").read_text(), re.M | re.S)
    return [each for block in blocks for each in yaml.YAML(typ="safe").load_all(block)]


def of_kind(kind: str, name: str) -> Any:
    (found,) = [each for each in manifests() if each.get("kind") == kind and each["metadata"]["name"] == name]
    return found


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every table in a manifest."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def parsed(*command: str) -> dict[str, Any]:
    """The options that `netfold COMMAND...` would run with."""
    group: Any = typer.main.get_command(app)
    with group.make_context("netfold", list(command)) as above:
        verb = group.get_command(above, command[0])
        with verb.make_context(command[0], list(command[1:]), parent=above) as context:
            return dict(context.params)


def test_every_variable_of_netfold_is_one_of_its_settings() -> None:
    known = set(re.findall(r"`(NETFOLD_[A-Z_]+)`", (DOCS / "reference" / "environment.md").read_text()))
    named = {each["name"] for each in parts(manifests()) if str(each.get("name", "")).startswith("NETFOLD_")}
    assert named and named <= known


def test_the_variables_of_a_rank_give_its_place_and_the_store() -> None:
    job, service = of_kind("Job", "train")["spec"], of_kind("Service", "train-store")
    (container,) = job["template"]["spec"]["containers"]
    sizes = set()
    for index in (0, job["completions"] - 1):
        environment = {}
        for each in container["env"]:
            environment[each["name"]] = each.get("value", str(index))
            assert "value" in each or each["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
        place = placement(meeting_at_store(environment))
        assert place.rank == index
        assert (place.host, place.port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
        sizes.add(place.size)
    assert sizes == {job["completions"]} == {job["parallelism"]} and job["completionMode"] == "Indexed"
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"


def test_the_service_leads_to_the_port_on_which_the_store_listens() -> None:
    service, store = of_kind("Service", "train-store"), of_kind("Deployment", "train-store")["spec"]
    port = service["spec"]["ports"][0]["port"]
    template = store["template"]
    assert service["spec"]["selector"] == store["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["command"][0] == "netfold"
    assert parsed(*container["command"][1:])["listen"] == f"0.0.0.0:{port}"
    assert container["readinessProbe"]["tcpSocket"]["port"] == port


def test_the_switch_is_asked_where_it_listens() -> None:
    deployment = of_kind("Deployment", "netfold-switch")["spec"]
    template = deployment["template"]
    assert deployment["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    values = {each["name"]: each.get("value", "10.0.0.7") for each in container["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["args"]]
    options = parsed("switch", *words)
    assert options["listen"] == f"10.0.0.7:{container['readinessProbe']['tcpSocket']['port']}"
    assert values["NETFOLD_SWITCH_METRICS"].endswith(f":{container['livenessProbe']['httpGet']['port']}")
    drain_s = float(words[words.index("--drain") + 1].removesuffix("s"))
    assert template["spec"]["terminationGracePeriodSeconds"] > drain_s
