"""NCCL's tuner: NCCL's tables go in, as NCCL makes them; the model's choice or NCCL's own comes out."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_ulong, c_void_p
from pathlib import Path
from typing import Any

import pytest
from load import seconds
from nccl.loader import Plugin, shared_object
from ranks import run_ranks, values
from sources import HELPERS
from typer.testing import CliRunner

from netfold.cli import app
from netfold.cli.nccl_env import TUNER
from netfold.tuning.nccl import SIZES, table_text
from netfold.tuning.nccl import seconds as modelled
from netfold.tuning.topology import Link

pytestmark = pytest.mark.native

VERSIONS = (3, 4, 5, 6)
FUNCTIONS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("LL", "LL128", "Simple")
IGNORED = -1.0
TABLE = """netfold-nccl-tuning 1
least-gain 0.2
shape 4 2
all_reduce 1024 tree LL 10 0
all_reduce 4096 tree LL 40 0
all_reduce 1024 ring Simple 20 0
all_reduce 4096 ring Simple 44 0
all_reduce 1024 ring LL 11.9 3
all_reduce 4096 ring LL 400 3
end
"""

_Logger = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)


class Tuner:
    """The plugin's tuner by one version, for a communicator. `log`: level and text."""

    def __init__(self, version: int = 6, ranks: int = 4, hosts: int = 2) -> None:
        info = [c_void_p, c_int, c_size_t, c_int, c_void_p, c_int, c_int, *([c_int] if version > 3 else [])]
        new = [POINTER(c_void_p), c_uint64, c_size_t, c_size_t, _Logger, c_void_p, c_void_p]
        init = new if version > 4 else [c_size_t, c_size_t, _Logger, POINTER(c_void_p)]
        fields = [
            ("name", c_char_p),
            ("init", CFUNCTYPE(c_int, *init)),
            ("info", CFUNCTYPE(c_int, *info, POINTER(c_int))),
            ("finalize", CFUNCTYPE(c_int, c_void_p)),
            *([("chunk_size", c_void_p)] if version > 5 else []),
        ]
        library = ctypes.CDLL(str(shared_object().parent / TUNER))
        kind: Any = type("Table", (Structure,), {"_fields_": fields})
        self.version, self.table = version, kind.in_dll(library, f"ncclTunerPlugin_v{version}")
        self.log: list[tuple[int, str]] = []
        self._logger = _Logger(self._write)
        self.context = c_void_p(1)
        if version > 4:
            code = self.table.init(byref(self.context), 7, ranks, hosts, self._logger, None, None)
        else:
            code = self.table.init(ranks, hosts, self._logger, byref(self.context))
        assert code == 0

    def _write(self, level: int, _: int, file: bytes, line: int, format_: bytes, text: bytes) -> None:
        assert file and line and format_ == b"TUNER/netfold: %s"
        self.log.append((level, text.decode()))

    def choice(
        self, bytes_: int, nccl: dict[tuple[str, str], float], function: str = "all_reduce", operations: int = 1
    ) -> tuple[str, str, int]:
        """The entry that NCCL takes of its own times after the tuner's call, and the channels that the tuner asks for.

        nccl: what is absent is ignored. Ignored entries must stay so, and of the others at most one may change.
        """
        times = (c_float * 21)(*(nccl.get((how, by), IGNORED) for how in ALGORITHMS for by in PROTOCOLS))
        before, channels = list(times), c_int(0)
        registered = [0] if self.version > 3 else []
        number = FUNCTIONS.index(function)
        code = self.table.info(self.context, number, bytes_, operations, times, 7, 3, *registered, byref(channels))
        assert code == 0
        assert [each for each in times if each < 0] == [each for each in before if each < 0]
        assert sum(one != other for one, other in zip(times, before, strict=True)) <= 1
        best = min((each for each in range(21) if times[each] >= 0), key=lambda each: times[each])  # as NCCL: the first
        return ALGORITHMS[best // 3], PROTOCOLS[best % 3], channels.value


RING_FIRST = {("ring", "Simple"): 5.0, ("tree", "LL"): 6.0, ("ring", "LL"): 7.0}


@pytest.fixture
def ran(tmp_path: Path) -> Any:
    """Runs a scenario in a process of its own, which reads NETFOLD_NCCL_TUNER once; the table's text, None for none."""

    def run(scenario: str, table: str | None) -> str:
        file = tmp_path / "table"
        env = {name: value for name, value in os.environ.items() if name != "NETFOLD_NCCL_TUNER"}
        env["PYTHONPATH"] = HELPERS
        if table is not None:
            file.write_text(table)
            env["NETFOLD_NCCL_TUNER"] = str(file)
        command = [sys.executable, "-c", "from nccl.test_tuner import *\n" + textwrap.dedent(scenario)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds(60))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_the_clearly_faster_one_is_taken_by_every_version(ran: Any) -> None:
    """At 1024 the table has tree LL at half of ring Simple's time; at 4096 they are 10% apart, and 20% are asked."""
    ran(
        """
        for version in VERSIONS:
            tuner = Tuner(version)
            assert [level for level, _ in tuner.log] == [3] and "checksum" in tuner.log[0][1]
            assert tuner.choice(1024, RING_FIRST) == ("tree", "LL", 0)
            assert tuner.choice(4096, RING_FIRST) == ("ring", "Simple", 0)
            # Between the sizes by the logarithm: 20 us against 29.7, then 35.6 against 41.2.
            assert tuner.choice(2048, RING_FIRST) == ("tree", "LL", 0)
            assert tuner.choice(3600, RING_FIRST) == ("ring", "Simple", 0)
            assert tuner.table.finalize(tuner.context) == 0
        """,
        TABLE,
    )


def test_what_is_not_in_the_table_stays_as_nccl_has_it(ran: Any) -> None:
    ran(
        """
        tuner = Tuner()
        ring = ("ring", "Simple", 0)
        assert tuner.choice(1023, RING_FIRST) == tuner.choice(4097, RING_FIRST) == ring  # beyond its sizes
        assert tuner.choice(1024, RING_FIRST, "broadcast") == ring
        assert tuner.choice(1024, RING_FIRST, operations=2) == ring  # joined operations
        assert tuner.choice(1024, {("nvls", "Simple"): 1.0, **RING_FIRST}) == ("nvls", "Simple", 0)
        assert tuner.choice(1024, {("pat", "Simple"): 1.0, **RING_FIRST}) == ("pat", "Simple", 0)
        tuner = Tuner(ranks=8)
        assert tuner.context.value is None and "--shape 8x2" in tuner.log[0][1], tuner.log
        assert tuner.choice(1024, RING_FIRST) == ring
        """,
        TABLE,
    )


def test_what_nccl_ignores_or_finds_far_worse_is_never_taken(ran: Any) -> None:
    """NCCL multiplies by 1024 what would lose precision."""
    ran(
        """
        tuner = Tuner()
        without_tree = {("ring", "Simple"): 5.0, ("ring", "LL"): 7.0}
        assert tuner.choice(1024, without_tree) == ("ring", "LL", 3)  # the next one, with its channels
        assert tuner.choice(1024, {("ring", "Simple"): 5.0}) == ("ring", "Simple", 0)
        assert tuner.choice(1024, {("ring", "Simple"): 5.0, ("tree", "LL"): 39.0}) == ("tree", "LL", 0)
        assert tuner.choice(1024, {("ring", "Simple"): 5.0, ("tree", "LL"): 41.0}) == ("ring", "Simple", 0)
        assert tuner.choice(1024, {("tree", "LL"): 5.0, ("ring", "LL"): 5.0}) == ("tree", "LL", 0)
        assert tuner.choice(1024, {("ring", "Simple"): 0.0, ("tree", "LL"): 0.0}) == ("tree", "LL", 0)
        """,
        TABLE,
    )


def test_it_is_off_unless_asked(ran: Any) -> None:
    said = ran("tuner = Tuner(); print(tuner.context.value, tuner.log, tuner.choice(1024, RING_FIRST))", None)
    assert said == "None [] ('ring', 'Simple', 0)"


def changed(old: str, new: str) -> str:
    assert old in TABLE
    return TABLE.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cut off"),
        ("something\n", "line 1: it does not begin with `netfold-nccl-tuning`"),
        (changed("tuning 1", "tuning 2"), "line 1: version 2, and this netfold reads version 1"),
        (changed("tuning 1", "tuning"), "line 1: expected `netfold-nccl-tuning 1`"),
        (changed("end\n", ""), "cut off"),
        (changed("44 0", "44"), "line 7: expected"),
        (TABLE[:-30], "line 9: expected"),
        (changed("end\n", "end\nmore\n"), "line 11: something follows"),
        (changed("tree", "star"), "line 4: 'star' is not an algorithm"),
        (changed("LL", "LL64"), "line 4: 'LL64' is not a protocol"),
        (changed("all_reduce", "all_add"), "line 4: 'all_add' is not a collective"),
        (changed("10 0", "nan 0"), "line 4: 'nan' is not a time"),
        (changed("10 0", "-10 0"), "line 4: '-10' is not a time"),
        (changed("10 0", "0 0"), "line 4: '0' is not a time"),
        (changed("10 0", "1,5 0"), "line 4: '1,5' is not a time"),
        (changed("10 0", "10 65"), "line 4: '65' is not a number of channels"),
        (changed("1024", "-1"), "line 4: '-1' is not a number of bytes"),
        (changed("4096", "1024"), "line 5: the sizes"),
        (changed("shape 4 2\n", ""), "line 3: a `shape` line"),
        (changed("shape 4 2", "shape 4 5"), "line 3: '5' is not a number of hosts"),
        (changed("shape 4 2", "shape 4 2\nshape 4 2"), "line 4: the shape was there before"),
        (changed("0.2", "-1"), "line 2: '-1' is not a gain"),
        ("#" * (5 << 20), "longer than 4 MiB"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_and_nccls_own_choice(ran: Any, text: str, why: str) -> None:
    said = ran(
        """
        tuners = [Tuner(6), Tuner(3)]
        assert all(tuner.choice(1024, RING_FIRST) == ("ring", "Simple", 0) for tuner in tuners)
        assert [len(tuner.log) for tuner in tuners] == [1, 1] and tuners[0].log[0][0] == 2
        print(tuners[0].log[0][1])
        """,
        text,
    )
    assert said.startswith("NETFOLD_NCCL_TUNER=/") and why in said
    assert said.endswith("; NCCL chooses by itself; write the file again with netfold nccl-tuning")


def test_an_absent_file_is_one_line(ran: Any) -> None:
    said = ran("os.environ['NETFOLD_NCCL_TUNER'] = '/nowhere/t'; t = Tuner(); print(len(t.log), t.log[0][1])", None)
    assert said.startswith("1 NETFOLD_NCCL_TUNER=/nowhere/t: /nowhere/t: No such file or directory")


def test_python_writes_what_the_tuner_reads(ran: Any, tmp_path: Path) -> None:
    """A measured link of high latency: the tree wins small sizes by far, the ring large ones."""
    link = Link(50e-6, 1.2e9)
    ran(
        """
        tuner = Tuner(ranks=16, hosts=8)
        ring, tree = {("ring", "LL"): 5.0, ("tree", "LL"): 6.0}, {("tree", "Simple"): 5.0, ("ring", "Simple"): 6.0}
        assert tuner.choice(4096, ring) == ("tree", "LL", 0)
        assert tuner.choice(1 << 32, tree) == ("tree", "Simple", 0)  # within the margin
        assert tuner.choice(1 << 32, {("ring", "LL"): 5.0, ("ring", "Simple"): 6.0}) == ("ring", "Simple", 0)
        """,
        table_text([(16, 8), (2, 2)], link),
    )
    assert modelled("all_reduce", "tree", "LL", 4096, 16, 8, link) < modelled(
        "all_reduce", "ring", "LL", 4096, 16, 8, link
    )


def test_the_verb_writes_a_table_of_a_measured_link(ran: Any, tmp_path: Path) -> None:
    measured, table = tmp_path / "links.json", tmp_path / "written"
    measured.write_text('{"links": [{"latency_s": 5e-5, "forward_bytes_per_s": 1.2e9, "reverse_bytes_per_s": 1.1e9}]}')
    command = ["nccl-tuning", str(measured), "-o", str(table)]
    run = CliRunner().invoke(app, [*command, "--shape", "4x2", "--shape", "8x8"])
    assert run.exit_code == 0, run.output
    text = table.read_text()
    assert text == table_text([(4, 2), (8, 8)], Link(5e-5, 1.1e9))
    assert text.count("all_reduce 1024 ") == 2 * 6 and len(SIZES) == 23
    ran("assert 'checksum' in Tuner().log[0][1]", text)
    for shapes, why in ((["4"], "expected RANKSxHOSTS"), (["4x1"], "only what crosses hosts"), (["4x2"] * 2, "twice")):
        run = CliRunner().invoke(app, [*command, *(word for shape in shapes for word in ("--shape", shape))])
        assert run.exit_code == 2 and why in run.output, run.output


def refused(rank: int, size: int, folder: str, tables: tuple[str, str]) -> str:
    """Connect to the other rank with tables that differ."""
    from netfold import FileStore

    os.environ["NETFOLD_NCCL_TUNER"] = tables[rank]
    plugin, store = Plugin(), FileStore(folder)
    handle, listener = plugin.listen()
    store.set(f"handle/{rank}", handle)
    other = store.get(f"handle/{1 - rank}", 30)
    try:
        plugin.connect(other, quiet_s=20)
    except Exception as error:
        return str(error)
    finally:
        store.set(f"done/{rank}", b"1")
        store.get(f"done/{1 - rank}", 30)
        plugin.close_listen(listener)
    return ""


@pytest.mark.parametrize("other", ["least-gain 0.3", None])
def test_ranks_with_other_tables_do_not_connect(tmp_path: Path, other: str | None) -> None:
    """They would run different algorithms: wait for each other, or add wrong values."""
    (tmp_path / "a").write_text(TABLE)
    (tmp_path / "b").write_text(TABLE if other is None else TABLE.replace("least-gain 0.2", other))
    env = {"NETFOLD_INTERFACE": "lo"}
    said = values(run_ranks(refused, 2, (str(tmp_path / "a"), str(tmp_path / "b")), env=env))
    for text in said:
        assert ("has another table for NCCL's tuner than this one" in text) == (other is not None), text
