"""tools/setup and tools/pip-install with stubs of commands that record or fail; no test installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import load
import pytest

ROOT = Path(__file__).parent.parent
# What the scripts use of the system itself.
OF_THE_SYSTEM = ("bash", "cat", "cut", "dirname", "env", "grep", "mktemp", "rm", "uname", "mkdir", "touch")


class Machine:
    """A PATH of stubs. A part is installed when its file is in `parts`; the stub of apt-get puts it there."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.parts, self.log = folder / "bin", folder / "parts", folder / "apt.log"
        self.bin.mkdir()
        self.parts.mkdir()
        self.log.touch()
        for name in OF_THE_SYSTEM:
            found = shutil.which(name)
            assert found is not None, name
            (self.bin / name).symlink_to(found)
        parts = self.parts
        # The text of a one-liner shows which of Python's three checks it is.
        self.stub(
            "python3",
            f'case "$2" in *version_info*) test -e {parts}/python3;; *ensurepip*) test -e {parts}/python3-venv;; '
            f"*) test -e {parts}/python3-dev;; esac",
        )
        self.stub(
            "c++",
            f'code=$(cat); case "$code" in *rdma*) test -e {parts}/libfabric-dev;; *) test -e {parts}/g++;; esac',
        )
        self.stub("make", "exit 0")
        for name in ("ip", "tc", "ss", "nft", "ethtool"):
            self.stub(name, "exit 0")
        self.user(0)
        # A copy, so that its place for the data set and the build it removes are not this machine's.
        self.script = folder / "tools" / "setup"
        self.script.parent.mkdir()
        text = (ROOT / "tools" / "setup").read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "PATH=$PATH")
        self.script.write_text(text.replace("/usr/share/datasets/fashion-mnist", str(parts / "dataset-fashion-mnist")))
        self.script.chmod(0o755)

    def stub(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def user(self, number: int) -> None:
        self.stub("id", f"echo {number}")

    def has(self, *parts: str) -> Machine:
        for part in parts:
            (self.parts / part).mkdir()
        return self

    def apt(self, install: str) -> Machine:
        """apt-get writes down its arguments and runs `install`, with $packages, for `apt-get install`."""
        options = 'while [ "${1:0:1}" = - ]; do [ "$1" = -o ] && shift; shift; done'
        self.stub(
            "apt-get",
            f'{options}; echo "$*" >>{self.log}; [ "$1" = update ] && exit 0; packages="${{*:4}}"; {install}',
        )
        return self

    def set_up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "TMPDIR": str(self.script.parent)}
        return load.run([self.script, *arguments], 60, env=env)


ALL = ("python3", "python3-venv", "python3-dev", "g++", "libfabric-dev", "dataset-fashion-mnist")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def sentence(run: subprocess.CompletedProcess[str]) -> str:
    (line,) = run.stderr.splitlines()
    return line


def test_without_a_missing_package_apt_is_not_called(machine: Machine) -> None:
    run = machine.has(*ALL).apt("exit 1").set_up()
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert machine.log.read_text() == ""


def test_root_with_apt_installs_only_what_is_missing(machine: Machine) -> None:
    built = machine.script.parents[1] / ".venv" / ".netfold"
    built.parent.mkdir()
    built.touch()
    machine.has(*ALL[:3]).apt(f"cd {machine.parts} && mkdir $packages")
    run = machine.set_up()
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    wanted = "install -y --no-install-recommends g++ libfabric-dev libfabric-bin dataset-fashion-mnist"
    assert machine.log.read_text().splitlines() == ["update", wanted]
    assert not built.exists()  # the next make builds with what is new


def test_a_browser_and_a_fuzzer_are_installed_only_when_they_are_asked_for(machine: Machine) -> None:
    machine.has(*ALL).apt("exit 0")
    assert "chromium" not in machine.set_up().stderr
    run = machine.set_up("browser", "fuzz")
    assert run.returncode == 0  # both are optional
    assert "Chromium (else the tests that open a page are skipped)" in sentence(run)
    assert machine.log.read_text().splitlines()[-1].endswith(" chromium clang libclang-rt-dev")


def test_a_user_without_root_gets_the_command_to_run(machine: Machine) -> None:
    machine.has("python3", "python3-venv", "g++", "libfabric-dev").apt("exit 1").user(1000)
    run = machine.set_up()
    assert run.returncode == 1
    told = sentence(run)
    assert "the C headers of python3 (required), the data set Fashion-MNIST (else" in told
    assert told.endswith(
        "you are not root; run as root: apt-get update && "
        "apt-get install -y --no-install-recommends python3-dev dataset-fashion-mnist"
    )
    assert machine.log.read_text() == ""


def test_missing_optional_packages_do_not_fail_the_setup(machine: Machine) -> None:
    machine.has(*ALL[:4], "dataset-fashion-mnist").apt("exit 1").user(1000)
    run = machine.set_up()
    assert run.returncode == 0
    assert "libfabric's headers (else this build has no fabrics); you are not root" in sentence(run)


def test_without_apt_the_packages_are_named(machine: Machine) -> None:
    run = machine.has(*ALL[:3], *ALL[4:]).set_up()
    assert run.returncode == 1
    assert "g++ 11" in sentence(run)
    assert "there is no apt-get here" in sentence(run)


def test_an_unreachable_apt_archive_is_reported_with_the_reason(machine: Machine) -> None:
    reason = "E: Failed to fetch http://archive/g++  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111)"
    machine.has(*ALL[:3], *ALL[4:]).apt(f"echo '{reason}' >&2; exit 100")
    run = machine.set_up()
    assert run.returncode == 1
    assert reason in sentence(run)
    assert sentence(run).endswith("apt-get install -y --no-install-recommends g++")
    assert len(machine.log.read_text().splitlines()) == 2  # called once, and not once more for each package


def test_one_unknown_package_does_not_prevent_the_others(machine: Machine) -> None:
    machine.has(*ALL[:3]).apt(
        'case "$packages" in *fashion*) echo "E: Unable to locate package dataset-fashion-mnist" >&2; exit 100;; '
        f"*) cd {machine.parts} && mkdir $packages;; esac"
    )
    run = machine.set_up()
    assert run.returncode == 0
    assert "this machine lacks the data set Fashion-MNIST (else the tests that read it are skipped);" in sentence(run)
    assert (machine.parts / "g++").exists()
    assert (machine.parts / "libfabric-dev").exists()


# tools/pip-install


def pip_install(machine: Machine, venv: Path, pip: str, venv_made: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with a Python whose `-m venv` makes an environment whose `-m pip install` runs `pip`."""
    inner = f'[ "$3" = --version ] && exit 0; {pip}'
    made = venv_made or f"mkdir -p {venv}/bin; cat {machine.bin}/inner >{venv}/bin/python; chmod +x {venv}/bin/python"
    (machine.bin / "chmod").symlink_to(shutil.which("chmod"))
    machine.stub("inner", inner)
    machine.stub("python3", made)
    env = {"PATH": str(machine.bin), "TMPDIR": str(machine.script.parent)}
    command = [ROOT / "tools" / "pip-install", venv, "torch==2.13.0"]
    return load.run(command, 60, env=env)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Retrying after 'ProxyError('Cannot connect to proxy.', NewConnectionError('...'))'", "ProxyError"),
        ("NameResolutionError: Temporary failure in name resolution", "Temporary failure in name resolution"),
    ],
)
def test_a_refusing_proxy_is_reported_in_one_sentence(machine: Machine, tmp_path: Path, line: str, reason: str) -> None:
    run = pip_install(machine, tmp_path / "venv", f'echo "WARNING: {line}" >&2; echo "ERROR: No match" >&2; exit 1')
    assert run.returncode == 1
    assert f"could not reach a package index ({reason})" in sentence(run)
    assert "http_proxy" in sentence(run)


def test_a_failed_build_shows_the_compilers_output(machine: Machine, tmp_path: Path) -> None:
    run = pip_install(machine, tmp_path / "venv", "echo 'kernel.cpp:7: error: no such name'; exit 1")
    first, last = run.stderr.splitlines()
    assert first == "kernel.cpp:7: error: no such name"
    assert "pip install torch==2.13.0 failed for the reason above" in last


def test_an_incomplete_environment_is_made_anew(machine: Machine, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("#!/bin/bash\necho 'No module named pip' >&2; exit 1\n")
    (venv / "bin" / "python").chmod(0o755)
    run = pip_install(machine, venv, f"echo $* >{tmp_path}/asked")
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "asked").read_text().endswith("install torch==2.13.0\n")


def test_a_failed_environment_leaves_no_folder(machine: Machine, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run = pip_install(machine, venv, "exit 0", f"mkdir {venv}; echo 'Error: ensurepip is not available'; exit 1")
    assert run.returncode == 1
    assert sentence(run).endswith("venv: Error: ensurepip is not available")
    assert not venv.exists()


def test_scripts_that_people_start_are_executable() -> None:
    for name in ("tools/setup", "tools/pip-install", "tools/test-bare", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name


# .ci/run


def ci(folder: Path, make: str, budget_s: int = 3600, python: str = "exit 0") -> subprocess.CompletedProcess[str]:
    """Run CI's script with stubs. make: cases of the stub `make`, which prints its target. python: .venv's Python."""
    script = folder / ".ci" / "run"
    script.parent.mkdir()
    script.write_text((ROOT / ".ci" / "run").read_text().replace("budget_s=3600", f"budget_s={budget_s}"))
    (folder / "tools").mkdir()
    stubs = folder / "stubs"
    stubs.mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    for path, text in (
        (folder / "tools" / "setup", "exit 0"),
        (folder / "tools" / "sanitize", 'echo "sanitized $*"'),
        (folder / ".venv" / "bin" / "python", python),
        (stubs / "make", f'echo "made $*"; case $1 in {make} esac'),
    ):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    return load.run([script], 60, env=env)


SUMMARY = "6000 passed, 69 skipped in 512.34s (0:08:32)"


def test_ci_ends_with_pytests_summary_and_the_skipped_parts(tmp_path: Path) -> None:
    run = ci(tmp_path, f"test) echo '{SUMMARY}';;")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == SUMMARY
    for target in ("check", "test", "test-jobs", "sanitize", "test-rack", "test-ecosystem"):
        assert f"made {target}" in [line.partition(" SANITIZE=")[0] for line in run.stdout.splitlines()]
    assert "made test-torch TORCH=2.15.0 PARTS=tests,products,probe\n" in run.stdout
    assert "ci: LEFT OUT: PyTorch's own suite with torch 2.15.0" in run.stdout
    assert "ci: LEFT OUT: test-soak, test-bare, test-image, test-cuda: never run here" in run.stdout


def test_ci_skips_parts_that_do_not_fit_the_hour(tmp_path: Path) -> None:
    run = ci(tmp_path, f"test) echo '{SUMMARY}';;", budget_s=700)
    assert run.returncode == 0, run.stdout + run.stderr
    for target in ("check", "test", "test-jobs", "sanitize", "test-rack"):
        assert f"made {target}" in [line.partition(" SANITIZE=")[0] for line in run.stdout.splitlines()]
    assert "ci: LEFT OUT: test-torch: takes about 900 s" in run.stdout
    assert "made test-torch" not in run.stdout
    assert run.stdout.splitlines()[-1] == SUMMARY


def test_ci_skips_a_torch_that_cannot_be_tested_here(tmp_path: Path) -> None:
    run = ci(tmp_path, f"test) echo '{SUMMARY}';;", python="echo 'pip does not find it here: no such release'; exit 3")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ci: LEFT OUT: test-torch with torch 2.15.0: pip does not find it here: no such release\n" in run.stdout
    assert "made test-torch" not in run.stdout


def test_ci_fails_if_the_check_for_a_torch_fails(tmp_path: Path) -> None:
    run = ci(tmp_path, f"test) echo '{SUMMARY}';;", python="exit 1")
    assert run.returncode == 1
    assert "ci: FAILED: test-torch (exit code 1), of whose output:\nERROR whether torch 2.15.0 can" in run.stdout
    assert "made test-torch" not in run.stdout
    assert "made test-ecosystem\n" in run.stdout


def test_ci_skips_a_suite_that_the_end_of_the_hour_interrupted(tmp_path: Path) -> None:
    run = ci(tmp_path, f"test) echo '{SUMMARY}';; test-rack) exit 124;;")  # the status of timeout's
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ci: LEFT OUT: test-rack: was not done after" in run.stdout
    assert run.stdout.splitlines()[-1] == SUMMARY


def test_ci_runs_the_rest_after_a_failure_and_fails(tmp_path: Path) -> None:
    lines = "echo 'FAILED tests/test_x.py::test_it - assert 1 == 2'; echo '1 failed, 5 passed in 1.00s'; exit 2"
    run = ci(tmp_path, f"check) echo 'x.py:3: error: wrong'; exit 3;; test) {lines};;")
    assert run.returncode == 1
    assert "made test-rack\n" in run.stdout
    *_, failed_check, error, failed_test, failure, last = run.stdout.splitlines()
    assert failed_check == "ci: FAILED: check (exit code 3), of whose output:"
    assert error == "x.py:3: error: wrong"
    assert failed_test == "ci: FAILED: test (exit code 2), of whose output:"
    assert failure == "FAILED tests/test_x.py::test_it - assert 1 == 2"
    assert last == "1 failed, 5 passed in 1.00s"


def repeating_ci(folder: Path, pytest: str) -> subprocess.CompletedProcess[str]:
    """CI whose suite `test` fails with one test; `pytest`: what a run of that test alone does."""
    python = (
        f'[ "$1" = -c ] && exec "{sys.executable}" "$@"; [ "$2" = --why-not ] && exit; echo "repeated $*"; {pytest}'
    )
    kept = ".pytest_cache/v/cache"
    failure = f"mkdir -p {kept}; echo '{{\"tests/test_x.py::test_it[a b]\": true}}' >{kept}/lastfailed"
    failure += "; echo 'FAILED tests/test_x.py::test_it[a b] - assert 1 == 2'; exit 2"
    return ci(folder, f"test) {failure};;", python=python)


def test_ci_reports_a_test_that_fails_once_and_passes_twice_beside_load_as_unstable(tmp_path: Path) -> None:
    run = repeating_ci(tmp_path, "exit 0")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("repeated -m pytest -q tests/test_x.py::test_it[a b]\n") == 2
    unstable = "ci: UNSTABLE in test, failed once and passed twice beside load: tests/test_x.py::test_it[a b], with:\n"
    assert unstable + "FAILED tests/test_x.py::test_it[a b] - assert 1 == 2\n" in run.stdout


def test_ci_fails_with_a_test_that_fails_again(tmp_path: Path) -> None:
    run = repeating_ci(tmp_path, "[ -e again ] && exit 1; touch again")
    assert run.returncode == 1
    assert run.stdout.count("repeated") == 2
    assert "UNSTABLE" not in run.stdout
    assert "ci: FAILED: test (exit code 2)" in run.stdout


def sanitizing_ci(folder: Path, said: str) -> subprocess.CompletedProcess[str]:
    """CI whose suite `sanitize` fails with one test and this output, and passes alone."""
    python = f'[ "$1" = -c ] && exec "{sys.executable}" "$@"; exit 0'
    kept = "build-sanitize/.pytest_cache/v/cache"
    kept_failure = f"mkdir -p {kept}; echo '{{\"tests/test_x.py::test_it\": true}}' >{kept}/lastfailed"
    return ci(folder, f"sanitize) {kept_failure}; echo '{said}'; exit 2;;", python=python)


def test_ci_repeats_a_test_that_fails_under_a_sanitizer_without_a_report(tmp_path: Path) -> None:
    run = sanitizing_ci(tmp_path, "1 failed")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("sanitized .venv/bin/python 2 ON tests/test_x.py::test_it\n") == 2
    unstable = "ci: UNSTABLE in sanitize, failed once and passed twice beside load: tests/test_x.py::test_it, with:\n"
    assert unstable in run.stdout


@pytest.mark.parametrize("said", ["==7==ERROR: AddressSanitizer: heap", "x.cpp:3: runtime error: y", "exit code -6"])
def test_ci_fails_with_a_report_of_a_sanitizer(said: str, tmp_path: Path) -> None:
    run = sanitizing_ci(tmp_path, said)
    assert run.returncode == 1
    assert "sanitized" not in run.stdout
    assert "ci: FAILED: sanitize (exit code 2)" in run.stdout
