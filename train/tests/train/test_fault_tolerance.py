"""Checkpoints, and every failure except the loss of a rank: one world of two processes runs all cases.

A case is a function of (rank, folder, world); `world(size)` makes ranks 0..size-1 a job of their own. Its test
checks the results of each rank.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World
from load import seconds
from ranks import running_switch

pytestmark = pytest.mark.torch

SAVING = {"every": 3}


def resumed(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """Attempts of one job: uninterrupted; interrupted after step 5 and resumed, on two ranks and on one."""
    from surviving import Recorder, interrupt_at, run

    found: dict[str, Any] = {}
    for noisy in (True, False):
        with world(2):
            whole = run(None, noisy=noisy)
            run(folder / f"{noisy}", noisy=noisy, checkpoint=SAVING, recorder=Recorder(interrupt_at(5)))
            if rank == 0:
                shutil.copytree(folder / f"{noisy}", folder / "fewer", dirs_exist_ok=True)
            recorder = Recorder()
            again = run(folder / f"{noisy}", noisy=noisy, checkpoint=SAVING, recorder=recorder)
        found[f"noisy {noisy}"] = whole.losses, again.losses, (whole.metric, again.metric), recorder.notes
    with world(1) as here:
        if here:
            found["2 to 1"] = run(folder / "fewer", noisy=False, checkpoint=SAVING).losses
            run(folder / "more", noisy=False, checkpoint=SAVING, recorder=Recorder(interrupt_at(5)))
    with world(2):
        found["1 to 2"] = run(folder / "more", noisy=False, checkpoint=SAVING).losses
    found["left"] = sorted(path.name for path in (folder / "True" / "checkpoints").iterdir())
    return found


def resharded(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """ZeRO 0, 1, 2 and 3, each resuming from the checkpoint of another."""
    from surviving import Recorder, interrupt_at, run

    found: dict[str, Any] = {}
    with world(2):
        found["whole"] = run(None, noisy=False).losses
        for before, after in ((0, 3), (3, 0), (0, 1), (1, 0), (1, 2), (3, 3), (2, 2), (1, 1)):
            into = folder / f"{before} to {after}"
            run(into, noisy=False, checkpoint=SAVING, recorder=Recorder(interrupt_at(5)), parallel={"zero": before})
            found[into.name] = run(into, noisy=False, checkpoint=SAVING, parallel={"zero": after}).losses
    return found


def update_kept(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """An optimizer step with its own state: two tensors per parameter, and a number."""
    import torch
    from surviving import Recorder, interrupt_at, run
    from torch.distributed.tensor import DTensor

    from netfold_train import trainer

    kept: list[Any] = []

    class Remembers(trainer.OptimizerStep):
        def __init__(self, replica: Any, *others: Any) -> None:
            super().__init__(replica, *others)
            self.parameters = dict(replica.named_parameters())
            self.sums: dict[Any, Any] = {
                each: {"total": torch.zeros_like(each), "steps": torch.zeros(2)} for each in self.parameters.values()
            }
            self.count = 0
            kept.append(self)

        def step(self, lr: float) -> float | None:
            for parameter, of_parameter in self.sums.items():
                of_parameter["total"] += parameter.grad
                of_parameter["steps"] += 1
            self.count += 1
            return super().step(lr)

        def states(self, saved: Any = None) -> Any:
            return {**super().states(saved), "sums": self.sums}

        def state_dict(self) -> dict[str, float]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.count = int(state["count"])

    found: dict[str, Any] = {}
    with world(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "OptimizerStep", Remembers)

        def ends_with() -> dict[str, Any]:
            last = kept[-1]
            tensors = {
                f"{name}.{key}": each.full_tensor() if isinstance(each, DTensor) else each
                for name, parameter in last.parameters.items()
                for key, each in last.sums[parameter].items()
            }
            return {name: each.flatten().tolist() for name, each in tensors.items()} | {"count": last.count}

        run(None, noisy=False)
        found["whole"] = ends_with()
        run(folder, noisy=False, checkpoint=SAVING, recorder=Recorder(interrupt_at(5)))
        if rank == 0:
            shutil.copytree(folder, folder.with_name("sharded"))
        run(folder, noisy=False, checkpoint=SAVING)
        found["again"] = ends_with()
        run(folder.with_name("sharded"), noisy=False, parallel={"zero": 3})
        found["sharded"] = ends_with()
    return found


def weak(rank: int, folder: Path, world: World) -> list[list[int]]:
    """The samples of each step on this rank: two ranks of 8, then one rank of 8."""
    from surviving import Recorder, interrupt_at, run

    lives: list[list[int]] = []
    training = {"scaling": "weak", "epochs": 1, "steps": None}
    with world(2):
        run(
            folder,
            noisy=False,
            forward=lives.append,
            training=training,
            checkpoint={"every": 2},
            recorder=Recorder(interrupt_at(3)),
        )
        lives.append([])
    with world(1) as here:
        if here:
            run(folder, noisy=False, forward=lives.append, training=training)
    return lives


def damaged(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """A damaged checkpoint, for each kind of damage and each policy."""
    from surviving import Recorder, run

    from netfold_train.checkpoint.state import CheckpointError

    def cut(path: Path) -> None:
        os.truncate(path / "__0_0.distcp", 100)

    def change(path: Path) -> None:
        with (path / "__0_0.distcp").open("r+b") as file:
            file.seek(700)
            byte = file.read(1)
            file.seek(700)
            file.write(bytes([byte[0] ^ 1]))

    def lose(path: Path) -> None:
        (path / ".metadata").unlink()

    def garble(path: Path) -> None:
        (path / "manifest.json").write_text("{")

    found: dict[str, Any] = {}
    with world(2):
        run(folder / "sound", noisy=False, checkpoint={"every": 4, "keep": 2})
    for name, harm in {"cut": cut, "change": change, "lose": lose, "garble": garble}.items():
        into = folder / name
        with world(2) as here:
            if rank == 0:
                shutil.copytree(folder / "sound", into)
                harm(into / "checkpoints" / "step-000008")
            here.barrier()
            try:
                run(into, noisy=False, fault_tolerance={"corrupt_checkpoint": "stop"})
            except CheckpointError as error:
                found[f"{name} stop"] = str(error)
            recorder = Recorder()
            found[name] = len(run(into, noisy=False, recorder=recorder).losses), recorder.notes
    return found


def other_model(rank: int, folder: Path, world: World) -> list[str]:
    """A run's folder is resumed with a recipe of another job."""
    from surviving import run

    found = []
    with world(2):
        run(folder, checkpoint=SAVING)
        for changes in ({"noisy": False}, {"optimizer": {"name": "sgd"}}, {"run": {"resume": "never"}}):
            try:
                run(folder, **changes)
            except ValueError as error:
                found.append(str(error))
        try:
            run(folder / "none", fault_tolerance={"non_finite": "rewind"}, checkpoint={"every": "end"})
        except ValueError as error:
            found.append(str(error))
        run(folder / "small", noisy=False)
        try:
            run(folder / "small", noisy=True)
        except ValueError as error:
            found.append(str(error))
    return found


def crashed(rank: int, folder: Path, world: World) -> list[str]:
    """The remaining files if the writer is killed at each of its calls to the disk in turn."""
    import torch
    from torch.distributed.checkpoint import save

    from netfold_train.checkpoint import atomic

    if rank:
        return []

    class CrashError(BaseException):
        pass

    found = []
    folder.mkdir()
    position = functools.partial(atomic.Position, samples=0, numbers={}, recipe={})
    for moment in range(100):
        into = folder / str(moment)
        into.mkdir()
        save(
            {"model.x": torch.arange(9.0)},
            storage_writer=atomic.AtomicCheckpointWriter(into, position(1), keep=1),
            no_dist=True,
        )
        calls = 0

        def counted(real: Callable[..., Any], moment: int = moment) -> Callable[..., Any]:
            def call(*arguments: Any, **keys: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > moment:
                    raise CrashError
                return real(*arguments, **keys)

            return call

        ended = "crashed"
        with pytest.MonkeyPatch.context() as patch:
            for holder, name in (
                (os, "fsync"), (Path, "rename"), (Path, "open"), (Path, "mkdir"), (Path, "unlink"), (os, "unlink"),
                (os, "rmdir"), (os, "open"),
            ):  # fmt: skip
                patch.setattr(holder, name, counted(getattr(holder, name)))
            writer = atomic.AtomicCheckpointWriter(into, position(2), keep=1)
            with contextlib.suppress(CrashError):
                try:
                    save({"model.x": torch.arange(9.0) + 1}, storage_writer=writer, no_dist=True)
                    ended = "whole"
                except BaseException as error:
                    assert "CrashError" in repr(error), error
        left = atomic.complete_checkpoints(into)
        assert left, f"moment {moment}: no checkpoint is left"
        for path in left:
            assert not atomic.find_damage(path, 0, 1), (moment, path)
        found.append(f"{ended} {left[-1].name}")
        atomic.remove_incomplete(into)
        assert not list(into.glob("*.part"))
        if ended == "whole":
            return found
    return found


def full(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """A full disk: a tiny one if this process may mount it, otherwise a simulated error."""
    from surviving import Recorder, run

    from netfold_train.checkpoint import atomic
    from netfold_train.checkpoint.state import CheckpointError

    found: dict[str, Any] = {}
    for policy in ("warn", "stop"):
        into = folder / policy
        with world(2) as here, pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            mounted = rank == 0 and tiny_disk(into, stack)
            here.barrier()

            def fill(step: int, into: Path = into, mounted: bool = mounted, patch: pytest.MonkeyPatch = patch) -> None:
                # After the first checkpoint is complete: the later ones have no space.
                deadline = time.monotonic() + seconds(20)
                while step == 4 and not (into / "checkpoints" / "step-000003").exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                if step == 4 and mounted:
                    with (into / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(4096))
                if step == 4 and rank == 0 and not mounted:

                    def no_room(*_: Any) -> Any:
                        raise OSError(errno.ENOSPC, "No space left on device")

                    patch.setattr(atomic.FileSystemWriter, "write_data", no_room)

            recorder = Recorder(fill)
            saving = {"every": 3, "asynchronous": policy == "stop"}
            try:
                ended = run(
                    into, noisy=False, recorder=recorder, fault_tolerance={"disk_full": policy}, checkpoint=saving
                )
                found[policy] = ended.step, ended.reason, recorder.notes
            except CheckpointError as error:
                found[policy] = str(error), type(error).__name__, recorder.notes
            here.barrier()
            found[f"{policy} left"] = sorted(path.name for path in (into / "checkpoints").iterdir())
            here.barrier()
    return found


def tiny_disk(at: Path, stack: contextlib.ExitStack) -> bool:
    """Mount a disk of 100 kB until the stack ends; return False if this process may not."""
    at.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(at)]
    if subprocess.run(mount, capture_output=True).returncode:
        return False
    stack.callback(subprocess.run, ["umount", "--lazy", str(at)], check=True)
    return True


def flat(rows: list[list[int]]) -> list[int]:
    return [number for row in rows for number in row]


def not_finite(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """One example is NaN, in the batch of one step on one of the ranks."""
    from surviving import Recorder, run

    from netfold_train.data.sampler import Sampler
    from netfold_train.fault_tolerance.policies import NonFiniteError

    order = Sampler(96, 0).indices(0, 96)

    def spoilt(*places: int) -> Callable[[Any, Any], None]:
        """Make the samples at these places of the order NaN."""
        poisoned = {order[place] for place in places}

        def change(indices: Any, features: Any) -> None:
            features[[index in poisoned for index in indices]] = float("nan")

        return change

    found: dict[str, Any] = {}
    with world(2):
        # All in step 6: rank 1's last but one, or rank 0's second. Ranks share rank 0's running means.
        for policy, place in (("stop", 46), ("skip", 41), ("rewind", 46)):
            recorder = Recorder()
            seen: list[list[int]] = []
            try:
                ended = run(
                    folder / policy,
                    recorder=recorder,
                    change=spoilt(place),
                    forward=seen.append,
                    checkpoint=SAVING,
                    fault_tolerance={"non_finite": policy},
                )
                found[policy] = (
                    ended,
                    recorder.notes,
                    [step.step for step in recorder.steps if step.skipped],
                    flat(seen),
                )
            except NonFiniteError as error:
                found[policy] = str(error)

        # Three bad batches in sequence; then three with good ones between, which a job repeats after a rewind.
        for policy, batches in (("skip", (4, 5, 6)), ("rewind", (4, 7, 10))):
            try:
                run(
                    folder / f"limit {policy}",
                    change=spoilt(*(batch * 8 for batch in batches)),
                    checkpoint=SAVING,
                    fault_tolerance={"non_finite": policy, "non_finite_limit": 3},
                )
            except NonFiniteError as error:
                found[f"limit {policy}"] = str(error)
    return found


def gradients_not_finite(rank: int, folder: Path, world: World) -> tuple[str, list[str]]:
    """The loss is finite, its gradient is not; then numbers whose sum is too large for f32."""
    import torch
    from surviving import run, toy_model

    from netfold_train import trainer
    from netfold_train.fault_tolerance.policies import NonFiniteError, bad_gradients

    model = toy_model(noisy=False)
    for parameter in model.module.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    large = bad_gradients(dict(model.module.named_parameters()))

    class Spoilt(trainer.OptimizerStep):
        """The last layer's gradient is changed on its way to rank 1."""

        def __init__(self, replica: Any, *others: Any) -> None:
            super().__init__(replica, *others)
            last = dict(replica.named_parameters())["layers.last.weight"]
            last.register_hook(lambda gradient: gradient * (float("inf") if rank else 1.0))

    with world(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "OptimizerStep", Spoilt)
        try:
            run(None, noisy=False)
        except NonFiniteError as error:
            return str(error), large
    return "", large


def vanished(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """Two examples cannot be read; with "stop" one rank meets one, and the other rank gets its error."""
    from surviving import Recorder, run

    from netfold_train import BadExampleError
    from netfold_train.data.sampler import Sampler

    gone = {index: f"/data/{index}.png" for index in Sampler(96, 0).indices(0, 64)[8 + 6 :: 16][:2]}

    def change(indices: Any, features: Any) -> None:
        for index in indices:
            if index in gone:
                raise BadExampleError(f"{gone[index]}: No such file or directory")

    found: dict[str, Any] = {"gone": sorted(gone)}
    for size in (2, 1):
        with world(size) as here:
            if here:
                recorder = Recorder()
                seen: list[list[int]] = []
                run(
                    None,
                    noisy=False,
                    recorder=recorder,
                    change=change,
                    forward=seen.append,
                    fault_tolerance={"missing_data": "skip"},
                )
                found[f"skip {size}"] = seen, recorder.notes
    with world(2):
        began_s = time.monotonic()
        try:
            run(None, change=change)
        except Exception as error:
            found["stop"] = type(error).__name__, str(error), time.monotonic() - began_s
    return found


def out_of_memory(rank: int, folder: Path, world: World) -> Any:
    """Rank 1's model allocates more memory than exists; then its device fails."""
    import torch
    from surviving import run

    def ask(numbers: list[int]) -> None:
        if rank == 1:
            torch.empty(1 << 50)

    def fail(numbers: list[int]) -> None:
        if rank == 1:
            raise torch.AcceleratorError("an illegal memory access was encountered")

    found = []
    for forward in (ask, fail):
        with world(2):
            began_s = time.monotonic()
            try:
                run(None, forward=forward)
            except Exception as error:
                found.append((type(error).__name__, str(error), time.monotonic() - began_s))
    return found


def straggling(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """Rank 1 is slow in the forward pass; then in making its batches."""
    from surviving import Recorder, run

    from netfold_train.fault_tolerance import straggler

    found: dict[str, Any] = {}
    with world(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler, "WINDOW_STEPS", 2)
        for policy in ("warn", "stop"):
            recorder = Recorder()
            try:
                run(
                    folder / policy,
                    recorder=recorder,
                    fault_tolerance={"straggler": policy, "straggler_ratio": 3.0},
                    training={"steps": 8},
                    forward=lambda numbers: time.sleep(0.2 * rank),
                )
                found[policy] = recorder.notes
            except straggler.StragglerError as error:
                found[policy] = str(error), sorted(path.name for path in (folder / policy / "checkpoints").iterdir())
    return found


def asked_to_stop(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """One rank gets SIGTERM in the middle of a step."""
    from surviving import Recorder, run

    before = signal.getsignal(signal.SIGTERM)
    calls = 0

    def forward(numbers: list[int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with world(2):
        whole = run(None)
        recorder = Recorder()
        first = run(folder, recorder=recorder, forward=forward)
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        second = run(folder)
    return {
        "whole": whole,
        "first": first,
        "second": second,
        "reason": recorder.reason,
        "left": left,
        "handler is back": signal.getsignal(signal.SIGTERM) == before,
    }


def lost_switch(rank: int, folder: Path, world: World) -> Any:
    """The switch that sums the gradients is killed after step 4."""
    from surviving import Recorder, run

    endpoint, pid = os.environ["SURVIVE_SWITCH"], int(os.environ["SURVIVE_SWITCH_PID"])

    def kill(step: int) -> None:
        if step == 4 and rank == 0:
            os.kill(pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"NETFOLD_SWITCH": endpoint, "NETFOLD_WIRE_DTYPE": "i32", "NETFOLD_PROBE": "off"}.items():
            patch.setenv(name, value)
        with world(2):
            alive = run(None)
            killed = run(folder, recorder=Recorder(kill), checkpoint=SAVING)
    return alive, killed


@contextlib.contextmanager
def beside_a_switch() -> Iterator[dict[str, str]]:
    with running_switch() as switch:
        yield {"SURVIVE_SWITCH": switch.endpoint, "SURVIVE_SWITCH_PID": str(switch.process.pid)}


FOUND = Cases(2, 100, [
    resumed, resharded, update_kept, weak, damaged, other_model, crashed, full, not_finite, gradients_not_finite,
    vanished, out_of_memory, straggling, asked_to_stop, lost_switch,
], beside_a_switch)  # fmt: skip


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one() -> None:
    for found in FOUND[resumed]:
        for kind in ("noisy True", "noisy False"):
            whole, again, metrics, _ = found[kind]
            assert again == whole[3:], "the same split: the same bits, dropout and running means too"
            assert metrics[0] == metrics[1]
            assert len(set(whole)) == 8
        assert found["left"] == ["step-000006", "step-000008"], "two are kept"
    assert FOUND[resumed][0]["noisy True"][3][0] == "info: continues from the checkpoint of step 3, 24 samples"


def test_a_run_resumes_on_more_or_fewer_ranks() -> None:
    found = FOUND[resumed][0]
    whole = found["noisy False"][0]
    # Five steps of f32, the same sums in another order.
    assert found["2 to 1"] == pytest.approx(whole[3:], rel=1e-5)
    assert found["1 to 2"] == pytest.approx(whole[3:], rel=1e-5)


def test_a_run_without_zero_resumes_with_it_and_back() -> None:
    for found in FOUND[resharded]:
        whole = found["whole"]
        assert len(found) == 9
        for change, losses in found.items():
            if change != "whole":
                assert losses == pytest.approx(whole[3:], rel=1e-5), change


def test_the_state_of_the_optimizer_step_is_resumed() -> None:
    for found in FOUND[update_kept]:
        whole = found["whole"]
        assert found["again"] == whole and whole["count"] == 8
        assert all(values_of == [8.0, 8.0] for name, values_of in whole.items() if name.endswith(".steps"))
        for name, values_of in found["sharded"].items():
            assert values_of == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_a_run_resumed_with_another_batch_continues_with_the_next_sample() -> None:
    from netfold_train.data.sampler import Sampler

    first, second = FOUND[weak]
    cut = first.index([])
    two_ranks = [a + b for a, b in zip(first[:cut], second[:cut], strict=True)]
    order = Sampler(96, 0)
    # Interrupted after step 3, with a checkpoint of step 2: 32 samples. The third step is repeated.
    assert flat(two_ranks) == order.indices(0, 48)
    assert flat(first[cut + 1 :]) == order.indices(32, 64)


def test_a_damaged_checkpoint_is_noted_and_the_previous_one_is_loaded() -> None:
    reasons = {
        "cut": "__0_0.distcp has 100 bytes, not",
        "change": "__0_0.distcp has changed: its checksum",
        "lose": ".metadata cannot be read: No such file",
        "garble": "manifest.json cannot be read",
    }
    for found in FOUND[damaged]:
        for harm, reason in reasons.items():
            steps, notes = found[harm]
            assert steps == 4, "from step 4 to step 8"
            assert reason in notes[0] and "was renamed" in notes[0] and "step-000008" in notes[0]
            assert "checkpoint of step 4" in notes[1]
            assert reason in found[f"{harm} stop"] and "fault_tolerance.corrupt_checkpoint" in found[f"{harm} stop"]


def test_a_checkpoint_of_another_job_is_an_error() -> None:
    for more, optimizer, never, _, less in FOUND[other_model]:
        assert "the model lacks buffer.layers.first.norm" in more and "model.layers.first.norm.bias;" in more
        assert "optimizer.name is 'sgd'" in optimizer and "'adam'" in optimizer
        assert "run.resume is 'never'" in never
        assert "it lacks model.layers.first.norm.weight" in less


def test_a_recipe_with_rewind_needs_checkpoints() -> None:
    assert all("set checkpoint.every" in found[3] for found in FOUND[other_model])


def test_a_crash_while_writing_leaves_complete_checkpoints_unchanged() -> None:
    found = FOUND[crashed][0]
    assert found[-1] == "whole step-000002"
    assert {"crashed step-000001", "crashed step-000002"} == set(found[:-1]), "before and after the rename"
    assert len(found) > 8


def test_a_full_disk_skips_a_checkpoint_or_ends_the_job_by_policy() -> None:
    for found in FOUND[full]:
        step, reason, notes = found["warn"]
        assert (step, reason) == (8, "done")
        assert len(notes) == 2 and all("No space left on device" in note for note in notes)
        assert "checkpoint of step 6" in notes[0]
        text, kind, _ = found["stop"]
        assert kind == "CheckpointStopError" and "checkpoint of step 6" in text and "rank 0: OSError" in text
        assert found["warn left"] == found["stop left"] == ["step-000003"], "what was half written is gone"


def test_a_loss_that_is_not_finite_stops_the_job_with_an_explanation() -> None:
    for found in FOUND[not_finite]:
        assert found["stop"].startswith("step 6: not finite: rank 1 (")
        assert "loss nan" in found["stop"] and "layers.first.linear.weight" in found["stop"]
        assert "rank 0" not in found["stop"]
    for text, large in FOUND[gradients_not_finite]:
        assert text.startswith("step 1: not finite: rank 0 (") and "gradients of layers.last.weight;" in text
        assert large == [], "large numbers are numbers"


def test_a_skipped_step_changes_no_state() -> None:
    for found in FOUND[not_finite]:
        ended, notes, skipped, _ = found["skip"]
        assert ended.step == 8 and skipped == [6]
        assert sum(math.isnan(loss) for loss in ended.losses) == 1
        assert math.isfinite(ended.metric), "a running mean would have kept the nan"
        assert "rank 0 (" in notes[0] and "the step is left out" in notes[0]


def test_a_rewind_restores_the_weights_and_continues_with_later_data() -> None:
    from netfold_train.data.sampler import Sampler

    first, second = (found["rewind"] for found in FOUND[not_finite])
    assert first[0].step == second[0].step == 8 and first[0].metric == second[0].metric
    assert "back to the weights of step 3, and continues with sample 48" in first[1][0]
    assert sorted(first[3] + second[3]) == sorted(Sampler(96, 0).indices(0, 88)), "11 steps, and no sample twice"


def test_the_limit_of_bad_steps_in_a_row_ends_the_job_under_any_policy() -> None:
    for found in FOUND[not_finite]:
        assert found["limit skip"].startswith("step 7:") and "3 in a row" in found["limit skip"]
        assert found["limit rewind"].startswith("step 6:") and "3 in a row" in found["limit rewind"], (
            "going back does not start the count anew"
        )


def test_a_missing_example_is_replaced_by_the_same_one_on_any_number_of_ranks() -> None:
    from netfold_train.data.sampler import Sampler

    first, second = FOUND[vanished]
    alone, notes = first["skip 1"]
    assert alone == [a + b for a, b in zip(first["skip 2"][0], second["skip 2"][0], strict=True)]
    order = Sampler(96, 0).indices(0, 64)
    replaced = [(was, now) for was, now in zip(order, flat(alone), strict=True) if was != now]
    assert sorted(was for was, _ in replaced) == first["gone"]
    assert not {now for _, now in replaced} & set(first["gone"])
    assert len(notes) == 2 and "/data/" in notes[0]


def test_a_missing_file_ends_the_job_on_all_ranks_at_once() -> None:
    (other, reported, other_s), (kind, text, own_s) = (found["stop"] for found in FOUND[vanished])
    assert kind == "BadExampleError" and text.startswith("rank 1 (")
    assert "step 2: /data/" in text and "fault_tolerance.missing_data" in text
    assert other in ("PeerLost", "RuntimeError") and "/data/" in reported, reported
    assert max(other_s, own_s) < seconds(20)


def test_an_out_of_memory_error_has_place_and_advice_on_all_ranks() -> None:
    (other, reported, other_s), (kind, text, own_s) = (found[0] for found in FOUND[out_of_memory])
    assert kind == "DeviceError" and "step 1 with a batch of [4, 8], [4, 1]: out of memory" in text
    assert "training.accumulate" in text
    assert other in ("PeerLost", "RuntimeError") and "out of memory" in reported, reported
    assert max(other_s, own_s) < seconds(20)


def test_a_failed_device_is_named() -> None:
    (other, reported, _), (kind, text, _) = (found[1] for found in FOUND[out_of_memory])
    assert kind == "DeviceError" and text.startswith("rank 1 (") and "the device failed: an illegal memory" in text
    assert other in ("PeerLost", "RuntimeError") and "an illegal memory access" in reported


def test_a_straggler_is_noted_once_or_ends_the_job_by_policy() -> None:
    for found in FOUND[straggling]:
        assert len(found["warn"]) == 1 and "rank 1 (" in found["warn"][0] and "rank 0" not in found["warn"][0]
        text, left = found["stop"]
        assert text.startswith("step 6: rank 1 (") and left == ["step-000006"]


def test_sigterm_to_one_rank_stops_all_ranks_after_the_same_step_without_loss() -> None:
    for each in FOUND[asked_to_stop]:
        assert each["first"].reason == each["reason"] == "SIGTERM" and each["first"].step == 5
        assert each["left"] == ["step-000005"]
        assert each["first"].losses + each["second"].losses == each["whole"].losses
        assert each["second"].metric == each["whole"].metric
        assert each["handler is back"]


def test_a_switch_killed_during_training_changes_no_result() -> None:
    for alive, killed in FOUND[lost_switch]:
        assert killed == alive and killed.step == 8
