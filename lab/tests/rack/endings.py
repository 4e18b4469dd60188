"""Whether a process that is not our child has ended."""

from pathlib import Path


def has_ended(pid: int) -> bool:
    """A zombie has ended: it only waits for its new parent to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
