"""The Python parsers of untrusted bytes: the corpus, mutations of it, and new inputs of atheris (`make test-fuzz`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from load import seconds
from python_targets import TARGETS, InvariantError, check, framed, seeds
from targets import HERE, corpus

from netfold.bootstrap.tcp_store import TcpStoreServer
from netfold.profile.run import RunError, read_run
from netfold_plan.cluster.load import cluster_of, load_cluster
from netfold_train.recipe.errors import RecipeError
from netfold_train.recipe.load import load

SECONDS = int(os.environ.get("FUZZ_SECONDS", "5"))
EXAMPLES = 100


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_inputs_of_a_python_parser_break_no_invariant(name: str) -> None:
    kept = sorted(corpus(name).iterdir())
    assert kept
    for path in kept:
        check(name, path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_of_a_python_parser_break_no_invariant(name: str) -> None:
    kept = [path.read_bytes() for path in sorted(corpus(name).iterdir())]

    # Of an input the part up to one place, some bytes, and the same or another input from another place on.
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.sampled_from(kept), st.sampled_from(kept), st.integers(0, 4096), st.integers(0, 4096), st.binary(max_size=16)
    )
    def changed(first: bytes, second: bytes, end: int, begin: int, between: bytes) -> None:
        check(name, first[:end] + between + second[begin:])

    changed()


def test_an_undocumented_exception_of_a_target_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "tokens", lambda data: [][data[0]])
    with pytest.raises(InvariantError, match="IndexError"):
        check("tokens", b"\1")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
def test_a_bounded_run_of_atheris_finds_no_broken_invariant(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed here (`make test-fuzz` installs it where it has a wheel)")
    command = [sys.executable, str(HERE / "python_targets.py"), name, str(SECONDS), str(tmp_path / "found")]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds(SECONDS + 60))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert " cov: " in run.stderr, "atheris saw no line of the parser"


# Faults that the first runs found, each corrected.

DEEP = "a = " + "[" * 5000 + "]" * 5000


def test_a_deeply_nested_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(DEEP)
    with pytest.raises(RecipeError, match="too deeply"):
        load(tmp_path / "deep.toml")


def test_a_recipe_with_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text("a = " + "9" * 5000)
    with pytest.raises(RecipeError, match="digits"):
        load(tmp_path / "long.toml")


def test_a_deeply_nested_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(DEEP)
    with pytest.raises(ValueError, match="too deeply"):
        load_cluster(str(tmp_path / "deep.toml"))


@pytest.mark.parametrize("change", [{"price_an_hour": 10**400}, {"tier": [{"devices": 10**400}]}])
def test_a_cluster_number_beyond_every_float_is_refused(change: dict[str, object]) -> None:
    tier = {"name": "t", "devices": 8, "latency": "1 us", "rate": "1 GB/s"}
    tree = {"device": "a100-80", "tier": [tier]}
    assert cluster_of(tree, "c").tiers[0].devices == 8
    tiers = [{**tier, **each} for each in change.get("tier", [{}])]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"price_an_hour|devices"):
        cluster_of({**tree, **change, "tier": tiers}, "c")


def test_a_quantity_beyond_every_float_is_refused() -> None:
    tier = {"name": "t", "devices": 8, "latency": "1e999 s", "rate": "1 GB/s"}
    with pytest.raises(ValueError, match="is too large"):
        cluster_of({"device": "a100-80", "tier": [tier]}, "c")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", "x"),
        ("rank", True),
        ("names", {"operation": 3}),
        ("coverage_gaps", [1]),
        ("groups", {"1": {"name": 1, "backend": "b"}}),
    ],
)
def test_a_profile_with_a_field_of_another_type_is_refused(field: str, value: object, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / f"rank-000{rank}"
        folder.mkdir()
        about = json.loads(seeds()["profile"][0].split(b"\n----\n")[1]) | {"rank": rank}
        (folder / "metadata.json").write_text(json.dumps(about))
    assert [trace.metadata.rank for trace in read_run(tmp_path).traces] == [0, 1]
    (folder / "metadata.json").write_text(json.dumps(about | {field: value}))
    with pytest.raises(RunError, match=field):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "rank-0000/metadata.json"])
def test_a_deeply_nested_profile_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0000").mkdir()
    (tmp_path / "rank-0000" / "metadata.json").write_bytes(seeds()["profile"][0].split(b"\n----\n")[1])
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(RunError, match=name):
        read_run(tmp_path)


def test_a_run_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0000").mkdir()
    (tmp_path / "rank-0000" / "metadata.json").write_bytes(seeds()["profile"][0].split(b"\n----\n")[1])
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError, match="object"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "request_",
    [
        # bytes(2**40) is a terabyte of zeros.
        {"type": "set", "values": {"k": 1 << 40}},
        {"type": "set", "values": {"k": [1, 2]}},
        {"type": "set", "values": [b"k", b"v"]},
        {"type": "get", "keys": ["k"] * 129, "timeout_s": 1.0},
        {"type": "get", "keys": [], "timeout_s": 1.0},
        {"type": "add", "key": "k", "amount": float("inf")},
        {"type": "add", "key": "k", "amount": "9" * 4000},
        {"type": "add", "key": "k", "amount": (1 << 63) - 1},
        {"type": "get", "keys": ["k"], "timeout_s": 1e300},
        {"type": "get", "keys": ["k"], "timeout_s": "1"},
    ],
)
def test_a_store_closes_a_connection_with_an_oversized_request(
    request_: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    server = TcpStoreServer("127.0.0.1", 0, "job")
    try:
        with pytest.raises(ValueError, match=r"bytes|whole number|waited for|1 to 128 keys"):
            server.reply(request_)
        assert (server._bytes, server._values, server._counters) == (0, {}, {})
        check("store", framed(request_))
    finally:
        server.close()
    assert not raised
