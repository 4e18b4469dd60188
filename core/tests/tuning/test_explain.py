"""`netfold explain`: what it prints, and what it refuses."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from netfold.cli import app


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments])
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def wide_and_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NETFOLD_ALGORITHM", "NETFOLD_SWITCH", "NETFOLD_TRANSPORT", "NETFOLD_WIRE_DTYPE"):
        monkeypatch.delenv(name, raising=False)


def test_explain_prints_all_candidates_with_the_choice_marked_and_the_reason_below() -> None:
    code, said = explain("all-reduce", "--size", "16M", "--ranks", "4")
    assert code == 0
    for algorithm in ("direct", "ring *", "halving_doubling", "tree", "in_network"):
        assert algorithm in said
    assert "no NETFOLD_SWITCH" in said
    assert said.splitlines()[-1].startswith("* ring, wire auto: predicted for ")


def test_the_size_in_the_reason_is_marked_as_an_example_of_its_range() -> None:
    for size, size_bytes in (("4", 4), ("4M", 4 << 20), ("64M", 64 << 20)):
        said = explain("all-reduce", "--size", size, "--ranks", "2")[1].splitlines()[-1]
        (found,) = re.findall(r"for (\d+) bytes, an example of (\d+) (?:to (\d+) bytes|bytes and more):", said)
        shown, least, most = (int(number or 1 << 62) for number in found)
        assert least <= size_bytes <= most
        assert least <= shown <= most


def test_links_and_hosts_can_be_named() -> None:
    code, said = explain("broadcast", "--size", "4K", "--ranks", "8", "--hosts", "2", "--latency", "5us")
    assert code == 0
    assert "broadcast of 4K on 8 ranks on 2 hosts" in said and "assumed: 5 us" in said


def test_the_transport_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETFOLD_TRANSPORT", "fabric:nosuch,memory")
    code, said = explain("all-reduce", "--hosts", "1")
    assert code == 0
    assert "no group can form: NETFOLD_TRANSPORT=fabric:nosuch,memory: " in said.splitlines()[-1]
    assert "shared_memory *" in said
    monkeypatch.setenv("NETFOLD_TRANSPORT", "tcp")
    said = explain("all-reduce", "--hosts", "1")[1]
    assert "shared_memory *" not in said
    assert "ranks of one host do not share memory: NETFOLD_TRANSPORT=tcp" in said


def test_the_reason_for_a_requested_algorithm_is_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETFOLD_ALGORITHM", "all_reduce=tree")
    assert "* tree, wire auto: NETFOLD_ALGORITHM=all_reduce=tree" in explain("all-reduce", "--size", "1M")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("all-scatter",), "no operation 'all_scatter'; there are all_reduce"),
        (("all-reduce", "--ranks", "2", "--hosts", "3"), "2 ranks cannot be on 3 hosts"),
    ],
)
def test_impossible_arguments_are_refused(arguments: tuple[str, ...], sentence: str) -> None:
    code, said = explain(*arguments)
    assert code == 2 and sentence in said


@pytest.mark.parametrize(
    ("switch", "sentence"),
    [
        ("10.0.0.7:7171", "are not authenticated: NETFOLD_SWITCH names no fingerprint"),
        ("10.0.0.7:7171#" + "a" * 64, "are authenticated (AES-GMAC, 16 bytes each)"),
    ],
)
def test_explain_reports_whether_packets_are_authenticated(
    monkeypatch: pytest.MonkeyPatch, switch: str, sentence: str
) -> None:
    monkeypatch.setenv("NETFOLD_SWITCH", switch)
    assert sentence in explain("all-reduce")[1].splitlines()[-1]


def test_a_malformed_switch_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETFOLD_SWITCH", "10.0.0.7:7171#abc")
    code, said = explain("all-reduce")
    assert code == 2 and "64 hexadecimal digits" in said
