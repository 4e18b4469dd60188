"""Make a checkpoint's folder complete or absent: write it under another name, add a manifest, rename it.

    step-000120.part/    being written, or left by a crash: removed at the next start
    step-000120/         complete: every rank's file, torch's .metadata, and manifest.json with size and CRC-32 of each
    step-000120.corrupt/ was complete, but a file is missing, short or changed: renamed when the damage was found

A rename is atomic (POSIX rename); files, manifest and folder are on the disk before it (fsync).
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MANIFEST = "manifest.json"
# In a run's folder.
CHECKPOINTS = "checkpoints"
PART, CORRUPT = ".part", ".corrupt"
# Bytes of one read for a checksum.
_READ_BYTES = 1 << 20
# The bytes of a file, and their CRC-32.
Checksum = tuple[int, int]


@dataclass(frozen=True)
class Position:
    """The progress of a job at the time of a checkpoint."""

    step: int
    samples: int
    """Taken from the data since the start of training."""
    numbers: dict[str, float]
    """Of `OptimizerStep.state_dict`."""
    recipe: dict[str, Any]


def read_manifest(folder: Path) -> tuple[Position, dict[str, Checksum]]:
    """(the checkpoint's position, the checksum of each file). Raises OSError, or ValueError for another content."""
    found = json.loads((folder / MANIFEST).read_text())
    try:
        files = {name: (int(size), int(crc32)) for name, (size, crc32) in found["files"].items()}
        return Position(**found["position"]), files
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def find_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run's folder; `folder` itself if it is one. Raises ValueError."""
    if (folder / MANIFEST).exists():
        return folder
    found = complete_checkpoints(folder / CHECKPOINTS)
    if not found:
        raise ValueError(f"{folder} {'holds no complete checkpoint' if folder.exists() else 'does not exist'}")
    return found[-1]


def remove_incomplete(folder: Path) -> None:
    """Remove what crashes have left."""
    for path in folder.glob(f"step-*{PART}"):
        shutil.rmtree(path)


def quarantine(path: Path) -> None:
    """Rename a damaged checkpoint."""
    aside = path.with_name(path.name + CORRUPT)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)


def find_damage(folder: Path, rank: int, ranks: int) -> str:
    """Read this rank's share of the files whole; return the first damage, or ""."""
    name = MANIFEST
    try:
        _, files = read_manifest(folder)
        for name in sorted(files)[rank::ranks]:
            (size, crc32), wanted = checksum(folder / name), files[name]
            if size != wanted[0]:
                return f"{name} has {size} bytes, not {wanted[0]}"
            if crc32 != wanted[1]:
                return f"{name} has changed: its checksum is not the manifest's"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{name} cannot be read: {error}"
    return ""


def checksum(path: Path) -> Checksum:
    size = crc32 = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            size, crc32 = size + len(data), zlib.crc32(data, crc32)
    return size, crc32


@dataclass(frozen=True)
class _Written(WriteResult):
    """torch's record of one tensor in a file, with the file's checksum, which so reaches rank 0."""

    checksum: Checksum


class AtomicCheckpointWriter(FileSystemWriter):
    """torch's writer; rank 0, which finishes last, also writes the manifest and renames the folder."""

    def __init__(self, folder: Path, position: Position, keep: int) -> None:
        super().__init__(folder / (name_of(position.step) + PART))
        self._folder, self._position, self._keep = folder, position, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # For a full disk torch's zip writer raises "unexpected pos". The disk's own error is its context, which
            # would not reach the other ranks.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        names = {each.storage_data.relative_path for each in results}
        sums = {name: checksum(Path(self.path) / name) for name in names}
        written: Future[list[WriteResult]] = Future()
        written.set_result([_Written(**vars(each), checksum=sums[each.storage_data.relative_path]) for each in results])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the folder, on rank 0, after all ranks have written. Raises OSError, and renames nothing then."""
        super().finish(metadata, results)
        part = Path(self.path)
        files = {".metadata": checksum(part / ".metadata")}
        for of_rank in cast(list[list[_Written]], results):
            files |= {each.storage_data.relative_path: each.checksum for each in of_rank}
        for name in files:
            if not (part / name).exists():
                raise FileNotFoundError(
                    f"{part / name} was written by another rank and is not here: all hosts must share {self._folder}"
                )
        with (part / MANIFEST).open("w") as file:
            json.dump({"position": asdict(self._position), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        part.rename(self._folder / name_of(self._position.step))
        _sync(self._folder)
        for old in complete_checkpoints(self._folder)[: -self._keep]:
            # Renamed first: a crash during the removal then leaves no incomplete checkpoint.
            shutil.rmtree(old.rename(old.with_name(old.name + PART)))


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
