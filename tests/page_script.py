"""Run the commands of a page as its reader would: in order, in an empty folder, with an empty home.

A page's commands are its fenced `shell` blocks. They run unless the HTML comment above the block says otherwise:

    <!-- not run: REASON -->    the block needs something that a test machine lacks
    <!-- file: NAME -->         the reader saves the block as NAME
    <!-- run -->                a block of Python that runs as it is; most show a part of a program

The run fails if any command fails: also one in a command substitution, and one in the background, whether it fails
early or while the page goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from load import seconds

FENCE = re.compile(r"^ *(?:<!-- (.+?) -->\n+ *)?```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

# What the test machine has in place of what a page names: an address of its own, folders of its own, and few steps.
SUBSTITUTES = (
    (r"\b10\.0\.0\.7\b|\b0\.0\.0\.0\b", "127.0.0.1"),
    (r"/etc/netfold\b", "$HOME/etc"),
    (r"/var/lib/netfold\b", "$HOME/state"),
    (r"(netfold(?:\.cli)? train (?:[a-z-]+|recipe\.toml))(?= --set|$| +#)", r"\1 --set training.steps=4"),
    (r"(netfold bench all-reduce)(?= )", r"\1 -b 64K -e 64K -n 2 -w 1"),
)

# The ERR trap sees a failure in a command substitution, whose status bash drops. The DEBUG trap runs before each
# command, and notes the process that the command before it left in the background.
_BEFORE = """\
set -Eeuo pipefail
last=
: & wait $!  # so that $! is set
first=$!
declare -A background=([$first]=:)
note() { if [[ -z ${background[$!]:-} ]]; then background[$!]=$1; fi; }
trap 'echo "failed: $BASH_COMMAND" >> "$FAILURES"' ERR
trap 'note "$last"; last=$BASH_COMMAND' DEBUG
"""
# A background command may run on; one that has ended must have succeeded. Each gets SETTLE tenths of a second to fail,
# for it may have begun in the last line, and starting Python takes a second.
_AFTER = """
for ((tenth = 0; tenth < SETTLE; tenth++)); do
    if [[ -z $(jobs -rp) ]]; then break; fi
    sleep 0.1
done
trap - DEBUG ERR
running=" $(jobs -rp | tr '\\n' ' ') "
unset "background[$first]"
for process in "${!background[@]}"; do
    if [[ $running == *" $process "* ]]; then continue; fi
    status=0
    wait "$process" || status=$?
    if [[ $status != 0 ]]; then echo "failed in the background: ${background[$process]}" >> "$FAILURES"; fi
done
"""


def script_of(page: str, folder: Path) -> str:
    """Write the files that a page names into `folder`; return its commands as one bash script, "" if it has none."""
    commands = []
    for mark, language, body in FENCE.findall(page):
        if mark.startswith("not run: "):
            continue
        if mark.startswith("file: "):
            (folder / mark.removeprefix("file: ")).write_text(body)
        elif language == "shell":
            commands.append(body)
        elif mark == "run":
            commands.append(f"python - <<'END_OF_PYTHON'\n{body}END_OF_PYTHON\n")
    script = "\n".join(commands)
    for pattern, substitute in SUBSTITUTES:
        script = re.sub(pattern, substitute, script, flags=re.MULTILINE)
    return script


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_page(script: str, folder: Path, timeout_s: float) -> tuple[list[str], str]:
    """Run a page's script in `folder`. Return its failures, a line each, and everything that it printed.

    folder: has only the files that the page names. The ports of pages (7171, 9171, 29400) become free ones.
    """
    for port in ("7171", "9171", "29400"):
        script = script.replace(port, str(free_port()))
    with contextlib.ExitStack() as stack:
        places = {name: folder.parent / f"{folder.name}.{name}" for name in ("home", "tmp", "output", "failures")}
        places["home"].mkdir()
        places["tmp"].mkdir()
        output = stack.enter_context(places["output"].open("w"))
        process = subprocess.Popen(
            ["bash", "-c", _BEFORE + script + _AFTER],
            cwd=folder,
            # Nothing of the developer's environment, but the netfold that is tested.
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(places["home"]),
                "TMPDIR": str(places["tmp"]),
                "FAILURES": str(places["failures"]),
                "SETTLE": str(round(10 * seconds(3))),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # The page may have left a switch in the background.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failures = places["failures"].read_text().splitlines() if places["failures"].exists() else []
    if status is None:
        failures.append(f"the page took longer than {timeout_s:.0f} s")
    elif status and not failures:
        failures.append(f"the script's exit status is {status}")
    return failures, places["output"].read_text()
