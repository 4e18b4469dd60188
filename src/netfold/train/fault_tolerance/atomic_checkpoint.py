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
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MANIFEST = "manifest.json"
PART, CORRUPT = ".part", ".corrupt"
# Bytes of one read for a checksum.
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Position:
    """The progress of a job at the time of a checkpoint."""

    step: int
    samples: int
    """Taken from the data since the start of training."""
    ranks: int
    taken_s: float
    """The time of day, in seconds since 1970."""
    numbers: dict[str, float]
    """Of `OptimizerStep.state_dict`."""
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    position: Position
    files: dict[str, tuple[int, int]]
    """name -> (bytes, CRC-32)."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError, a sentence, if the manifest cannot be read."""
        try:
            found = json.loads((folder / MANIFEST).read_text())
            files = {name: (int(size), int(crc32)) for name, (size, crc32) in found["files"].items()}
            return cls(Position(**found["position"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / MANIFEST} cannot be read: {error}") from error


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if not path.suffix and path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def remove_incomplete(folder: Path) -> list[str]:
    """Remove what crashes have left; return the names."""
    left = sorted(folder.glob(f"step-*{PART}"))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def quarantine(path: Path) -> None:
    """Rename a damaged checkpoint."""
    aside = path.with_name(path.name + CORRUPT)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)


def find_damage(folder: Path, manifest: Manifest, rank: int, ranks: int) -> str:
    """Read this rank's share of the files whole; return the first damage, or ""."""
    for name in sorted(manifest.files)[rank::ranks]:
        size, crc32 = manifest.files[name]
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            if checksum(folder / name) != crc32:
                return f"{name} has changed: its checksum is not the manifest's"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            value = zlib.crc32(data, value)
    return value


@dataclass(frozen=True)
class _Written(WriteResult):
    """torch's record of one tensor in a file, with the file's checksum, which so reaches rank 0."""

    crc32: int


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
        names = {result.storage_data.relative_path for result in results}
        sums = {name: checksum(Path(self.path) / name) for name in names}
        sealed: Future[list[WriteResult]] = Future()
        sealed.set_result(
            [
                _Written(each.index, each.size_in_bytes, each.storage_data, sums[each.storage_data.relative_path])
                for each in results
            ]
        )
        return sealed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the folder, on rank 0, after all ranks have written. Raises OSError, and renames nothing then."""
        super().finish(metadata, results)
        part = Path(self.path)
        sums = {".metadata": checksum(part / ".metadata")}
        for result in (each for of_rank in results for each in of_rank):
            assert isinstance(result, _Written)
            sums[result.storage_data.relative_path] = result.crc32
        # If another rank's file is on another disk, `_size` raises FileNotFoundError.
        files = {name: (self._size(part / name), crc32) for name, crc32 in sums.items()}
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

    def _size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} was written by another rank and is not here: all hosts must share {self._folder}"
            ) from None


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
