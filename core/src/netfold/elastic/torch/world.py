"""A training loop whose ranks come and go: attempts of steps, over torch's default group of the generation of now.

An attempt is one step of every rank. It ends in one of these ways, on all ranks alike:

    its vote passed                  the step counts; the optimizer applies it
    a member was lost before that    the ranks that are left form the next generation, and the body runs again

A rank that was in the vote when a member was lost does not know how it ended. The agreement with the other ranks tells
(members.py), while the rank still is in its optimizer's hook: then the optimizer applies the step, or the body is left.

All collectives of a loop belong into attempts, before the vote. After the vote a lost member would end the body in the
middle of changes that the other ranks have made; between two attempts it would end the process. Both are refused in the
first step, and not only when a member is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from netfold.elastic.change import Change
from netfold.elastic.members import STORE_VARIABLE, Members
from netfold.elastic.policy import Parts, Policy, divide, keep
from netfold.elastic.torch import transfer
from netfold.elastic.torch.state import State
from netfold.errors import NetfoldError
from netfold.options import Options
from netfold.torch.factory import default_group_of
from netfold.torch.operations import operations_of
from netfold.torch.store import TorchStore

log = logging.getLogger("netfold")


class World:
    """This process's place among the ranks of an elastic job. A context manager; one thread uses it."""

    def __init__(
        self,
        state: State | Callable[[World], State],
        *,
        policy: Policy | None = None,
        numbers: int = 0,
        min_size: int = 1,
        max_size: int | None = None,
        step: int = 0,
        backend: str = "netfold",
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        members: Members | None = None,
        log_level: int = logging.WARNING,
    ) -> None:
        """Entering joins the job that the launcher's environment names (`Members.from_environment`).

        The first ranks begin with rank 0's state. A newcomer is sent the state by a member, before entering returns.
        state: borrowed until the end. A function makes it, where that needs torch's groups: it is called for each
        generation, before a newcomer is sent the state, and is collective.
        policy: of the batch; then `samples`, `part` and `weight` say what to compute. None: the body divides by itself.
        min_size, max_size: the fewest ranks that go on, and the most that train; more newcomers wait as spares.
        numbers: how many numbers each vote adds up (`vote`).
        step: the number of attempts that the state counts (a checkpoint's); the same on all first ranks.
        backend: of torch's default group, with netfold for the CPU: "cpu:netfold,cuda:nccl".
        timeout_s: of an operation. join_timeout_s: of a change.
        log_level: of the line about each change, on rank 0.
        members: instead of those of the environment; owned by this object from here on.

        Cost of entering: the start-up of a group; then the state's bytes, broadcast among the first ranks, or sent to a
        newcomer by one member. Cost of a change: an agreement, the start-up of a group, and the state for those that
        lack it.
        Entering raises ValueError for a launcher's missing variables, or samples that do not divide among the ranks;
        RendezvousError where no group forms, no member answers or the job is done; TooFewLeft. Leaving the context
        without an error waits until all ranks have ended their loops; with one, the other ranks get the error's text.
        """
        self._make_state = state if callable(state) else None
        if isinstance(state, State):
            self.state = state
        self.policy, self._numbers = policy, numbers
        self._level = log_level
        self.last_change = ""
        """The sentence about the last change, for people."""
        self._result = np.zeros(1 + numbers)  # of the last vote: the steps that it made, and the sums
        self.step = step
        """The attempts that have passed: the number of the one under way, from 0."""
        self.rank, self.size, self.generation = 0, 1, 0
        """Of now. They do not change within an attempt, nor does `step`."""
        self.left = False
        """This process has left by its own wish (`leave`). Its loop must end."""
        self._progress = _Progress()
        self._parts: Parts | None = None
        self._step_samples = 0
        self._lr_factor = 1.0
        self._given = members
        self._settings: dict[str, Any] = {
            "options": options, "min_size": min_size, "max_size": max_size, "done": step, "timeout_s": timeout_s,
            "join_timeout_s": join_timeout_s,
        }  # fmt: skip
        self._backend, self._timeout = backend, timedelta(seconds=timeout_s)
        self._callbacks: list[Callable[[World], None]] = []
        self._in_attempt = self._voted = False
        self._pending: Change | None = None  # decided in the vote, to be adopted after the attempt
        self._changes_next = False
        self._collectives = 0
        self._end_hooks: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[World], None]) -> Callable[[World], None]:
        """Call `callback(world)` for this generation and every later one: to wrap modules, make groups, divide data.

        It is collective: all ranks call the same functions in the same order. The state is whole. Returns `callback`.
        If a member is lost meanwhile, all callbacks run again in the next generation. Raises what `callback` raises
        otherwise, and TooFewLeft.
        """
        self._callbacks.append(callback)
        try:
            callback(self)
        except Exception as error:
            self._adopt(self._change(error))
        self._collectives = self._submitted()
        return callback

    def leave(self) -> None:
        """Leave the job at the end of this attempt, or of the next: a signal's handler may call this.

        The other ranks lose no step by it. Afterwards `left` is set. Cost: a flag, which the next vote carries.
        """
        self.members.leave()

    # --- a step ---

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """One step: the body computes gradients and calls `optimizer.step()`, which votes first.

        A body that steps no optimizer of the state calls `vote` before it changes anything that a repeated body would
        change again; else the end of the body votes.
        Afterwards `step` has grown by 1, or a member was lost and the body must run again: write a loop on `step`.
        Exceptions of the body's own pass through. Raises TooFewLeft where too few ranks are left; RuntimeError for
        collectives outside of attempts or after the vote, and for a rank that has left.
        Cost: the vote, and a copy of what the body may change before it (`State`).
        """
        self._check_place("between two attempts", "end this process")
        self._in_attempt, self._voted = True, False
        self._lr_factor = self.lr_factor
        if self.policy is not None:
            self._divided()
        self.state.begin()
        try:
            yield
            if not self._voted:
                self.vote()
            self._check_place("after the vote", "leave the rest of this rank's body undone")
        except _Repeat as repeat:
            self._end_attempt(repeat.change)
        except Exception as error:
            if self._voted:
                self._count_step()
            if self._voted or not self._is_lost():
                raise
            self._end_attempt(self._change(error))
        else:
            self._count_step()
            change = self._pending
            if change is None and self._changes_next:
                change = self._change(None)
            if change is not None:
                self._adopt(change)
            self.step = self.members.done
        finally:
            self._in_attempt, self._pending, self._changes_next = False, None, False
        self._collectives = self._submitted()

    def _count_step(self) -> None:
        # Samples that the policy left out count too: no rank takes them later.
        self._progress.samples += self._step_samples
        self._parts, self.step = None, self.members.done

    def vote(self, numbers: Sequence[float] = ()) -> list[float]:
        """Wait until every rank has all that it needs for this step. At most one vote is taken in an attempt.

        Returns where the step is to be applied. Else it leaves the body, which then runs again.
        numbers: as many as the constructor was told; none: zeros. Returns their sums over the ranks, f64, alike on all
        of them.
        Raises RuntimeError outside of an attempt, TooFewLeft.
        Cost: an all_reduce of 24 bytes, or of 8 for each number and 8 more.
        """
        if not self._in_attempt:
            raise RuntimeError("netfold.elastic: a step of this state's optimizer outside of World.attempt()")
        if self._voted:
            return self._sums()
        try:
            self._changes_next = self._all_vote(numbers)
        except Exception as error:
            if not self._is_lost():
                raise
            change = self._change(error)
            if not change.apply:
                raise _Repeat(change) from None
            self._pending = change
        self._voted = True
        self._collectives = self._submitted()
        return self._sums()

    def _sums(self) -> list[float]:
        return [float(each) for each in self._result[1:]]

    def _all_vote(self, numbers: Sequence[float]) -> bool:
        """Whether the generation changes after this step."""
        members = self.members
        if not self._numbers:
            return members.vote().changes
        sums = np.array([members.begin_vote(), *(numbers or [0.0] * self._numbers)], np.float64)
        members.communicator.all_reduce(sums)
        vote = members.pass_vote(int(sums[0]))
        self._result = np.array([vote.done, *sums[1:]])
        return vote.changes

    def _with_result(self, change: Change) -> Change:
        """Tell the last vote's sums to a rank that learned of its end by the agreement. Collective.

        Returns the change, or the next one if a member is lost meanwhile.
        """
        if not self._numbers or change.left:
            return change
        try:
            rows = self.members.communicator.all_gather(self._result)
        except Exception as error:
            after = self._change(error)
            return dataclasses.replace(after, apply=change.apply or after.apply)
        self._result = np.array(max(rows, key=lambda row: float(row[0])))
        return change

    # --- the data of a step, by the policy ---

    @property
    def samples(self) -> int:
        """The samples of the job before this step: the position in the data."""
        return self._progress.samples

    @property
    def part(self) -> range:
        """The numbers of this rank's samples of this step, counted from the start of the job.

        Raises ValueError where the constructor was given no policy.
        """
        own = self._divided().ranges[self.rank]
        return range(self.samples + own.start, self.samples + own.stop)

    @property
    def weight(self) -> float:
        """The factor of this rank's mean loss, so that DDP's mean over ranks is the mean over the step's samples.

        Raises ValueError where the constructor was given no policy.
        """
        return self._divided().weight(self.rank)

    @property
    def lr_factor(self) -> float:
        """The policy's factor of the learning rate. The state's optimizers apply it in their steps."""
        return 1.0 if self.policy is None else self.policy.factor(self.size, self._progress.first_size)

    def _divided(self) -> Parts:
        if self.policy is None:
            raise ValueError("netfold.elastic: World was given no policy, so it divides no samples")
        if self._parts is None:
            self._step_samples = self.policy.step_samples(self.size, self._progress.first_size)
            self._parts = divide(self._step_samples, self.size)
        return self._parts

    def _use(self, state: State) -> None:
        self._end_hooks()
        self.state = state
        self._end_hooks = state.on_step(self.vote, lambda: self._lr_factor)

    # --- begin and end ---

    def __enter__(self) -> World:
        self.members = self._given or Members.from_environment(store=agent_store(), **self._settings)
        try:
            self._progress.first_size = self.members.size
            if self._make_state is None:
                self._use(self.state)
            first = self.members.first
            self._adopt(None if first is None else self._with_result(first))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self._collectives = self._submitted()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end_hooks()
        if error is None and not self.left:
            self._finish()
        elif error is not None and not self.left:
            # Other ranks get the reason.
            self.members.communicator.group.abort(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
        self.members.close()

    def _finish(self) -> None:
        """Wait until every rank has ended its loop: a rank in its last vote may still need this rank's report."""
        while True:
            try:
                self.members.communicator.barrier()
                return self.members.finish()
            except Exception as error:
                try:
                    self._adopt(self._change(error))
                except NetfoldError:
                    return  # The ranks that do not answer have passed this barrier.

    # --- from one generation to the next ---

    def _end_attempt(self, change: Change) -> None:
        """Prepare to run the body again."""
        self.state.restore()
        self._adopt(change)
        self.step = self.members.done

    def _is_lost(self) -> bool:
        """Whether the generation has ended, also by the failure of a group of some of its ranks."""
        if self.members.failed:
            return True
        for operations in _groups():
            if operations.netfold.failure is not None:
                self.members.communicator.group.abort(f"a group of some ranks failed: {operations.netfold.failure}")
                return True
        return False

    def _change(self, error: BaseException | None) -> Change:
        """Agree on the next generation. Raises `error` if it is not of a lost member."""
        if error is not None:
            if not self._is_lost():
                raise error
            # Ranks that wait in them for this one must not wait for a timeout.
            for operations in _groups():
                operations.netfold.abort(f"a member was lost: {error}")
        change = self.members.change(error)
        if self._parts is not None:
            self._parts = self._after(self._parts, change)
        return self._with_result(change)

    def _after(self, parts: Parts, change: Change) -> Parts | None:
        """The parts of a step that is repeated after this change; None: it is divided anew."""
        if self.policy is None or self.policy.lost_samples == "repeat" or change.left:
            return None
        kept = keep(parts, change.former)
        # With more newcomers than lost ranks one would have nothing to compute.
        return kept if all(map(len, kept.ranges)) else None

    def _adopt(self, change: Change | None) -> None:
        """Make torch's groups of a generation, send the state to ranks that lack it, and call the callbacks.

        change: None for the first generation. A member may be lost meanwhile: then the next generation follows.
        """
        while True:
            if change is not None and change.left:
                self._leave_torch()
                self.left = True
                return
            try:
                self._enter_torch()
                if self._make_state is not None:
                    self._use(self._make_state(self))
                if change is None:
                    self._begin_alike()
                else:
                    self._send_state(change)
                    self._tell(change)
                if self.policy is not None:
                    self._divided()  # raises for numbers that do not divide
                for callback in self._callbacks:
                    callback(self)
                return
            except Exception as error:
                change = self._change(error)

    def _enter_torch(self) -> None:
        self._leave_torch()
        members = self.members
        self.rank, self.size, self.generation = members.rank, members.size, members.generation
        # The group is formed, so netfold needs no store.
        store: Any = PrefixStore(f"netfold elastic {self.generation}", HashStore())
        with default_group_of(members.communicator.group):
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )

    def _leave_torch(self) -> None:
        if not dist.is_initialized():
            return
        dist.destroy_process_group()
        # All of these belong to the groups that have ended. Their hooks on the parameters would take part in the next
        # backward pass, and their buckets hold memory, until the garbage collector finds them.
        for each in gc.get_objects():
            if issubclass(type(each), DistributedDataParallel) and vars(each).get("reducer") is not None:
                each.reducer._remove_autograd_hooks()
                each.reducer = each.logger = None

    def _begin_alike(self) -> None:
        """Give every rank of the first generation rank 0's state."""
        if self.size > 1:
            direction = transfer.send if self.rank == 0 else transfer.receive
            direction(self._all_parts(), transfer.Broadcast())
        if self.rank == 0 and self.policy is not None:
            log.info("elastic: %d ranks: %s", self.size, self.policy.describe(self.size, self._progress.first_size))

    def _send_state(self, change: Change) -> None:
        parts = self._all_parts()
        for receiver, sender in change.lacking.items():
            if self.rank == sender:
                transfer.send(parts, transfer.SendTo(receiver))
            elif self.rank == receiver:
                transfer.receive(parts, transfer.ReceiveFrom(sender))
                self.members.received()
        self.step = self.members.done

    def _all_parts(self) -> dict[str, Any]:
        return {**self.state.parts, "the world's own": self._progress}

    def _tell(self, change: Change) -> None:
        lost = "".join(f"; lost rank {each.rank} ({each.where}): {each.why}" for each in change.lost)
        joined = f"; {len(change.new)} joined" if change.new else ""
        policy = f"; {self.policy.describe(self.size, self._progress.first_size)}" if self.policy is not None else ""
        self.last_change = (
            f"generation {change.generation} has {change.size} ranks, from step {change.done}{lost}{joined}"
        )
        if self.rank == 0:
            log.log(self._level, "elastic: %s%s", self.last_change, policy)

    def _submitted(self) -> int:
        return 0 if self.left else self.members.communicator.group.collectives_submitted

    def _check_place(self, where: str, harm: str) -> None:
        """Raise RuntimeError for collectives since the vote, or since the last attempt. The group's own are counted."""
        if self.left:
            raise RuntimeError("netfold.elastic: this rank has left the job (World.left)")
        count = self._submitted() - self._collectives
        if count > 0 and not self.members.failed:
            raise RuntimeError(
                f"netfold.elastic: {count} collective{'s' if count > 1 else ''} of the default group {where}: a lost "
                f"member would {harm}; move them into the attempt, before optimizer.step() or World.vote()"
            )


class _Repeat(BaseException):
    """Leaves the body of an attempt, through any `except Exception` of its own."""

    def __init__(self, change: Change) -> None:
        super().__init__("the body of an elastic attempt runs again")
        self.change = change


class _Progress:
    """The part of the state that is not the user's."""

    def __init__(self) -> None:
        self.samples = 0
        self.first_size = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def _groups() -> Iterator[Any]:
    """netfold's operations of every group of torch, but the default one."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and (operations := operations_of(group)) is not None:
            yield operations


def agent_store() -> TorchStore | None:
    """The store of torchrun's agents, which outlives ranks. None: there is none, or NETFOLD_STORE names another."""
    if STORE_VARIABLE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TorchStore(TCPStore(host, port, is_master=False, wait_for_workers=False))
