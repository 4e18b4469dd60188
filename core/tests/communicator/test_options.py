"""Options: fields, variables, defaults, and the errors for invalid values."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from ranks import run_threads

import netfold.options
from netfold import Communicator, FileStore, Options
from netfold.options import known_variables

pytestmark = pytest.mark.native


def test_a_field_overrides_its_variable_which_overrides_the_default() -> None:
    environment = {"NETFOLD_ALGORITHM": "ring", "NETFOLD_WIRE_DTYPE": "bf16", "NETFOLD_SPIN_US": "7"}
    options = Options(wire_dtype="f16").resolved(environment)
    assert options == Options(
        switch=None,
        algorithm="ring",
        wire_dtype="f16",
        transport="auto",
        single_copy="on",
        share_buckets="on",
        window_bytes=1 << 20,
        probe="on",
        spin_us=7,
        reconnect_s=10,
        rejoin_s=5,
        intra_host="auto",
        pinned_bytes=0,
        rma_min_bytes=64 << 10,
        registration_cache_entries=1024,
        registration_cache_bytes=4 << 30,
        security="none",
    )


def test_an_empty_variable_counts_as_unset() -> None:
    environment = {f"NETFOLD_{field.name.upper()}": " " for field in dataclasses.fields(Options)}
    assert Options().resolved(environment) == Options().resolved({})


@pytest.mark.parametrize("text", ["nonsense", "127.0.0.1", ":7171", "host:port", "host:-1", "host:70000", "7171"])
def test_a_malformed_switch_address_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"NETFOLD_SWITCH is .* expected host:port, such as 127\.0\.0\.1:7171"):
        Options().resolved({"NETFOLD_SWITCH": text})


@pytest.mark.parametrize("text", ["127.0.0.1:7171", "switch.example:1", "[::1]:65535"])
def test_a_switch_address_may_be_a_name_or_of_either_family(text: str) -> None:
    assert Options().resolved({"NETFOLD_SWITCH": text}).switch == text


@pytest.mark.parametrize(
    "variable", ["NETFOLD_WINDOW_BYTES", "NETFOLD_SPIN_US", "NETFOLD_REJOIN_S", "NETFOLD_PINNED_BYTES"]
)
@pytest.mark.parametrize("text", ["many", "-1", "1.5", "0x10"])
def test_a_malformed_number_is_refused_with_its_variable(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{text}' is not a whole number"):
        Options().resolved({variable: text})


def _join(rank: int, size: int, folder: str, options: Options) -> None:
    Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=20).close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(algorithm="nonsense"), "NETFOLD_ALGORITHM='nonsense' is not one of"),
        (
            Options(algorithm="broadcast=ring"),
            "there is no broadcast by ring; there are direct, in_network, shared_memory, tree, hierarchical, chain",
        ),
        (Options(wire_dtype="nonsense"), "NETFOLD_WIRE_DTYPE='nonsense' is not one of"),
        (Options(probe="nonsense"), "NETFOLD_PROBE='nonsense' is not one of on, off"),
        (Options(algorithm="in_network"), "NETFOLD_ALGORITHM=in_network needs an aggregator"),
        (Options(switch="nonsense"), "NETFOLD_SWITCH is 'nonsense'; expected host:port"),
    ],
)
def test_every_rank_refuses_invalid_options_at_once(options: Options, sentence: str) -> None:
    """Once, only rank 0 checked the options, and the others waited a minute for a rank 0 that had given up."""
    for outcome in run_threads(_join, 3, options, timeout_s=5):
        assert outcome.error == "ValueError"
        assert sentence in outcome.text


def test_a_rank_outside_its_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of a group of 2"):
        _join(2, 2, str(tmp_path), Options())


def test_hints_replace_options_by_the_names_of_their_variables() -> None:
    own = Options(spin_us=7, wire_dtype="bf16", switch="leaf:1").resolved({})
    found = own.with_hints({"NETFOLD_WIRE_DTYPE": "f32", "NETFOLD_SWITCH": "", "another_backends": "x"})
    assert found == dataclasses.replace(own, wire_dtype="f32", switch=None)
    assert own.with_hints({}) == own
    with pytest.raises(ValueError, match="the hint NETFOLD_WIRE is no option of a group"):
        own.with_hints({"NETFOLD_WIRE": "f32"})
    with pytest.raises(ValueError, match="NETFOLD_PROBE='maybe' is not one of on, off"):
        own.with_hints({"NETFOLD_PROBE": "maybe"})


def test_every_variable_of_the_page_is_known_and_only_those() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/environment.md").read_text()
    listed = set(re.findall(r"^\| `(NETFOLD_\w+)`", page, re.MULTILINE))
    assert listed == {*known_variables()}


def test_unknown_variables_are_warned_of_once_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(netfold.options, "_warned", False)
    monkeypatch.setenv("NETFOLD_SWICH", "127.0.0.1:7171")
    monkeypatch.setenv("NETFOLD_QQQQ", "1")
    for number in range(2):
        Communicator(FileStore(str(tmp_path / str(number))), 0, 1).close()
    (warning,) = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert warning.endswith("NETFOLD_QQQQ, NETFOLD_SWICH (did you mean NETFOLD_SWITCH?)")
