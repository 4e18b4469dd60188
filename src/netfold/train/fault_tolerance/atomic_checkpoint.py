"""A checkpoint's folder is there whole or not at all: written under another name, sealed with a manifest, renamed.

    step-000120.part/    being written, or left behind by a crash: swept at the next start
    step-000120/         whole: every rank's file, torch's .metadata, and manifest.json with size and CRC-32 of each
    step-000120.corrupt/ was whole once, and a file is gone, short or changed: put aside when that was found

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
# What is read at once for a checksum.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Position:
    """Where a job was when a checkpoint was taken."""

    step: int
    samples: int
    """Taken from the data since the start of training."""
    ranks: int
    taken_s: float
    """The time of day, seconds since 1970."""
    numbers: dict[str, float]
    """Of `Update.state_dict`."""
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    position: Position
    files: dict[str, tuple[int, int]]
    """name -> (bytes, CRC-32)."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError, in words, where it cannot be read."""
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
    """Remove what crashes left behind; the names."""
    left = sorted(folder.glob(f"step-*{PART}"))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def quarantine(path: Path) -> None:
    aside = path.with_name(path.name + CORRUPT)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)


def find_damage(folder: Path, manifest: Manifest, rank: int, ranks: int) -> str:
    """What is wrong with this rank's share of the files, read whole; "" where nothing is."""
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
        while piece := file.read(_PIECE_BYTES):
            value = zlib.crc32(piece, value)
    return value


@dataclass(frozen=True)
class _Written(WriteResult):
    """torch's word for one tensor in a file, with the checksum of that file: so it reaches rank 0 with the rest."""

    crc32: int


class AtomicCheckpointWriter(FileSystemWriter):
    """torch's writer of files, and what makes a folder of them whole: the last to finish, rank 0, seals it."""

    def __init__(self, folder: Path, position: Position, keep: int) -> None:
        super().__init__(folder / (name_of(position.step) + PART))
        self._folder, self._position, self._keep = folder, position, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # torch's zip writer says "unexpected pos" of a full disk; what the disk said is behind it, and would be
            # lost on the way to the other ranks.
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
        """On rank 0, when the files of all ranks are complete. Raises OSError; then nothing was sealed."""
        super().finish(metadata, results)
        part = Path(self.path)
        sums = {".metadata": checksum(part / ".metadata")}
        for result in (each for of_rank in results for each in of_rank):
            assert isinstance(result, _Written)
            sums[result.storage_data.relative_path] = result.crc32
        # A file of a rank that this one cannot see is on another disk: FileNotFoundError says so.
        files = {name: (self._size(part / name), crc32) for name, crc32 in sums.items()}
        with (part / MANIFEST).open("w") as file:
            json.dump({"position": asdict(self._position), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        part.rename(self._folder / name_of(self._position.step))
        _sync(self._folder)
        for old in complete_checkpoints(self._folder)[: -self._keep]:
            # Under a name that a crash in the middle makes a leftover of, and not a checkpoint without a file.
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
