"""Everything that a machine with a GPU can show, in less than ten minutes and without a network:

    python lab/bench/gpus.py --output FOLDER      # by a Python whose torch has CUDA, with netfold and pytest

The parts: whether two processes reach each other's GPU memory, and the other tests of `make test-cuda`; IPC against
staged copies between two processes on one GPU; DDP steps over netfold, NCCL and gloo; two processes on one GPU in two
network namespaces with a shaped link, which needs root; `netfold train` on the recipes of EDSR, ResNet-50 and GPT for a
minute each. Each part is a process of its own with a time limit. If a part fails or is late, the next one runs all the
same, and the page names it.

Writes FOLDER/gpus.md, also after each part, and FOLDER/logs, the output of each part. The exit code is 0 if all parts
were done, 1 if a part failed, and 2 if a part was not run (no GPU, no root) and none failed.

    python lab/bench/gpus.py --device cpu         # tries the script itself on the CPU
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from netfold_lab.bench.table import markdown
from netfold_train.runs.machine import describe_machine, describe_versions, in_words

ROOT = Path(__file__).parents[2]
# For all parts together, of the ten minutes. The rest is for ends: a part that is late gets `_GRACE_S` to end.
TOTAL_S = 570.0
_GRACE_S = 10.0
RECIPE_S = 60.0
# Loading data, models and CUDA, and saving at the end.
_RECIPE_MORE_S = 30.0
RECIPES = ("edsr-large", "resnet50", "gpt")
# Enough that a minute never ends them.
_STEPS = 10_000_000
# Quantiles need two after the first quarter.
_LEAST_STEPS = 4
_INTERRUPTED = 75  # netfold train's exit code after SIGTERM
_NOT_RUN = 2


@dataclass(frozen=True)
class Outcome:
    """A part's end. verdict: "done", "failed", or "not run". text: Markdown."""

    verdict: str
    text: str


@dataclass(frozen=True)
class Part:
    """A part: its name, the seconds that it may take, and what runs it within the seconds that are left."""

    name: str
    limit_s: float
    run: Callable[[Path, float], Outcome]


def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for gpus.md and logs.")] = Path(
        "lab/bench/results"
    ),
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    only: Annotated[str, typer.Option(help="Parts whose names begin with one of these words, by comma.")] = "",
    recipe_s: Annotated[float, typer.Option(help="Seconds of each recipe.")] = RECIPE_S,
) -> None:
    began, results = time.monotonic(), list[tuple[Part, Outcome, float]]()
    (output / "logs").mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    parts = [part for part in _parts(device, recipe_s) if part.name.startswith(tuple(only.split(",")))]
    for part in parts:
        left_s = TOTAL_S - (time.monotonic() - began)
        limit_s, part_began = min(part.limit_s, left_s), time.monotonic()
        print(f"{part.name}: at most {max(0.0, limit_s):.0f} s", flush=True)
        if limit_s < 1.0:
            outcome = Outcome("not run", f"The {TOTAL_S:.0f} s of all parts were over.")
        else:
            try:
                outcome = part.run(output / "logs", limit_s)
            except Exception as error:
                outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        results.append((part, outcome, time.monotonic() - part_began))
        print(f"{part.name}: {outcome.verdict}", flush=True)
        page = _page(device, load, results, len(parts), time.monotonic() - began)
        (output / "gpus.md").write_text(page)
    verdicts = {outcome.verdict for _, outcome, _ in results}
    raise SystemExit(1 if "failed" in verdicts else _NOT_RUN if "not run" in verdicts else 0)


def _parts(device: str, recipe_s: float) -> Iterator[Part]:
    chosen = ["--device", device]
    tests = ["core/tests/torch/device/test_cuda.py", "train/tests/train/test_train_cuda.py"]
    yield Part("selftest", 40.0, _selftest)
    yield Part("tests", 140.0, lambda logs, limit_s: _tests(logs, limit_s, tests))
    yield Part("paths on one GPU", 45.0, lambda logs, limit_s: _measure(logs, limit_s, "paths", []))
    yield Part("DDP steps", 100.0, lambda logs, limit_s: _measure(logs, limit_s, "steps", [*chosen, *_small(device)]))
    yield Part("link", 45.0, lambda logs, limit_s: _measure(logs, limit_s, "between-hosts", chosen, root=True))
    for name in RECIPES:
        yield Part(
            f"recipe {name}",
            recipe_s + _RECIPE_MORE_S,
            lambda logs, limit_s, name=name: _recipe(logs, limit_s, name, device, recipe_s),  # type: ignore[misc]
        )


def _small(device: str) -> list[str]:
    """A CPU takes seconds for a step of ResNet-50: enough to see that the script works."""
    return [] if device == "cuda" else ["--rounds", "1", "--steps", "1", "--models", "ResNet-50"]


def _selftest(logs: Path, limit_s: float) -> Outcome:
    ended, log = _bounded([sys.executable, "-m", "netfold.torch.device.selftest"], logs / "selftest.txt", limit_s)
    if ended:
        return _failed(ended, limit_s, log)
    return Outcome("not run" if log.startswith("no GPU") else "done", f"```\n{log.strip()}\n```")


def _tests(logs: Path, limit_s: float, paths: Sequence[str]) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *paths]
    ended, log = _bounded(command, logs / "tests.txt", limit_s)
    summary = log.strip().splitlines()[-1:] or ["no output"]
    skipped = [line for line in log.splitlines() if line.startswith("SKIPPED")]
    text = "\n".join([summary[0] + ".", *(f"- {line}" for line in skipped)])
    if ended:
        return _failed(ended, limit_s, log)
    return Outcome("not run" if any("no GPU" in line for line in skipped) else "done", text)


def _measure(logs: Path, limit_s: float, name: str, options: Sequence[str], *, root: bool = False) -> Outcome:
    if root and os.geteuid() != 0:
        return Outcome("not run", "Namespaces need root.")
    page = logs / f"{name}.md"
    page.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "lab" / "bench" / "gpu_parts.py"), name, "-o", str(page), *options]
    ended, log = _bounded(command, logs / f"{name}.txt", limit_s)
    if ended == _NOT_RUN and "no GPU" in log:
        return Outcome("not run", "torch finds no CUDA device here.")
    if ended or not page.exists():
        return _failed(ended, limit_s, log)
    _, _, body = page.read_text().partition("\n\n")  # which begins with the command
    return Outcome("done", body.strip())


def _recipe(logs: Path, limit_s: float, name: str, device: str, recipe_s: float) -> Outcome:
    """Train for `recipe_s` seconds, then ask the run to stop."""
    with tempfile.TemporaryDirectory(prefix="netfold-gpus-") as folder:
        settings = [f"device.kind={device}", f"training.steps={_STEPS}", f"run.folder={folder}", "run.check=false"]
        words = ["train", "run", str(ROOT / f"train/src/netfold_train/recipes/{name}.toml")]
        words += [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-c", "from netfold.cli import main; main()", *words]
        ended, log = _bounded(command, logs / f"recipe-{name}.txt", limit_s, stop_after_s=min(recipe_s, limit_s))
        if "finds no CUDA device" in log:
            return Outcome("not run", "torch finds no CUDA device here.")
        if ended not in (0, _INTERRUPTED):
            return _failed(ended, limit_s, log)
        metrics = "".join(path.read_text() for path in Path(folder).glob("*/metrics.jsonl"))
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.splitlines()]
    stepped = [line for line in lines if line["kind"] == "step"]
    if len(stepped) < _LEAST_STEPS:
        return Outcome("failed", f"{len(stepped)} steps in {recipe_s:.0f} s; give it longer by --recipe-s.")
    # The first steps load kernels.
    later = stepped[len(stepped) // 4 :]
    rates = statistics.quantiles([line["samples_per_s"] for line in later], n=20)
    row = [
        str(len(stepped)),
        f"{statistics.median(line['samples_per_s'] for line in later):.4g} ({rates[0]:.4g} .. {rates[-1]:.4g})",
        f"{stepped[0]['loss']:.4g}",
        f"{stepped[-1]['loss']:.4g}",
    ]
    table = markdown(
        ["steps", "samples a second, without the first quarter (5% .. 95%)", "first loss", "last loss"], [row]
    )
    shown = shlex.join(words).replace(f"{ROOT}/", "").replace(folder, "FOLDER")
    return Outcome("done", f"`netfold {shown}`\n\n" + "\n".join(table))


def _bounded(
    command: Sequence[str], log: Path, limit_s: float, *, stop_after_s: float | None = None
) -> tuple[int, str]:
    """Run a command in a session of its own. Returns its exit code, and what it printed, which `log` keeps.

    stop_after_s: then it gets SIGTERM, and until `limit_s` to end. After `limit_s` the whole session is ended, and the
    exit code is negative.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"},
        )
        try:
            code = None
            if stop_after_s is not None:
                code = _wait(process, stop_after_s)
                if code is None:
                    process.terminate()
            code = _wait(process, limit_s - (stop_after_s or 0.0)) if code is None else code
            if code is None:
                _signal_session(process, signal.SIGTERM)
                _wait(process, _GRACE_S)
        finally:
            _signal_session(process, signal.SIGKILL)
            ended = process.wait()
    return (ended if code is not None else -int(signal.SIGTERM)), log.read_text(errors="replace")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _failed(ended: int, limit_s: float, log: str) -> Outcome:
    why = f"It was not done after {limit_s:.0f} s" if ended < 0 else f"Exit code {ended}"
    last = "\n".join(log.strip().splitlines()[-15:])
    return Outcome("failed", f"{why}. The last lines:\n\n```\n{last}\n```")


def _card(device: str) -> str:
    """The cards' names and the driver's version, without a CUDA context in this process."""
    if device != "cuda":
        return "CPU tensors, to try the script"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "no card: nvidia-smi does not answer"
    return "; ".join(found.strip().splitlines()) or "no card"


def _page(device: str, load: float, results: Sequence[tuple[Part, Outcome, float]], count: int, seconds: float) -> str:
    from importlib.metadata import version

    machine = {**describe_machine(), "cores": os.cpu_count()}
    where = in_words(machine, (load, os.getloadavg()[0]), describe_versions({"torch": version("torch")}))
    rows = [[part.name, outcome.verdict, f"{took:.0f} s"] for part, outcome, took in results]
    summary = "\n".join(markdown(["part", "", "took"], rows))
    parts = "\n\n".join(f"## {part.name}: {outcome.verdict}\n\n{outcome.text}" for part, outcome, _ in results)
    return f"""# GPUs

`{shlex.join(["lab/bench/gpus.py", *sys.argv[1:]])}`: {len(results)} of {count} parts in {seconds:.0f} s.
Card: {_card(device)}. {where}.

{summary}

{parts}
"""


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
