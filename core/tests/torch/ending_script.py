"""Two ranks for each way to end a process, and with children by fork: `python ending_script.py FOLDER [NAME ...]`.

The ranks are forked off this interpreter, which has imported torch and netfold, and fall out of this script at its end.
So they end as any interpreter does. Prints JSON: name -> the exit code and the output of each rank.
"""

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.utils.data

import netfold.torch.operations  # noqa: F401 - once, for all ranks

TOGETHER = 4  # rows at a time
COUNT = 1_500_000  # more than a connection buffers

folder = sys.argv[1]
name, rank = "", -1
kept = []  # until the interpreter's end


def begin(**options):
    where = f"file://{folder}/{name}-store"
    dist.init_process_group("netfold", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=90))
    check()


def check():
    """The group works."""
    for count in (10, 100_000):
        tensor = torch.full((count,), rank + 1.0)
        dist.all_reduce(tensor)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        assert future.wait()[0].eq(6).all()


def wait_for_ever():
    with contextlib.suppress(Exception):  # the other rank's end may come first
        dist.recv(torch.zeros(1), 1 - rank)
    time.sleep(60)


def leave_pending():
    """An operation that no other rank joins, with a callback."""
    tensor = torch.ones(100_000)
    if rank == 1:
        kept.append(dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: (future.value(), kept)))


# --- ways to end -----------------------------------------------------------------------------------------------------


def returned():
    begin()
    tensor = torch.full((100_000,), 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    kept.extend([tensor, work, work.get_future().then(lambda future: (future.value(), kept))])


def destroyed():
    returned()
    dist.destroy_process_group()


def exited_with_a_pending_operation():
    begin()
    leave_pending()
    sys.exit(3)


def raised_with_a_pending_operation():
    begin()
    leave_pending()
    raise ZeroDivisionError("planted")


def left_by_os_exit():
    begin()
    leave_pending()
    os._exit(5)


def terminated():
    begin()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    wait_for_ever()


def terminated_with_a_handler():
    begin()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    wait_for_ever()


def destroyed_in_a_handler():
    begin()

    def leave(*_):
        dist.destroy_process_group()
        sys.exit(6)

    signal.signal(signal.SIGTERM, leave)
    leave_pending()
    os.kill(os.getpid(), signal.SIGTERM)


def used_at_exit():
    begin()
    atexit.register(lambda: (check(), dist.destroy_process_group(), print("used")))


def used_at_exit_after_netfold_ended():
    def late():
        try:
            dist.barrier()
        except ValueError as error:
            print(error)
        dist.destroy_process_group()

    atexit.register(late)  # runs last
    begin()


def daemon_threads_go_on():
    begin()

    def use():
        group = dist.new_group(use_local_synchronization=True)
        with contextlib.suppress(Exception):
            while True:
                dist.all_reduce(torch.ones(5000), group=group, async_op=True).get_future().wait()

    for target in (use, wait_for_ever):
        threading.Thread(target=target, daemon=True).start()
    time.sleep(0.2)


def a_thread_goes_on():
    begin()

    def use():
        time.sleep(0.2)
        check()
        print("used")

    threading.Thread(target=use).start()


def callbacks_go_on():
    begin()
    for _ in range(200):
        future = dist.all_reduce(torch.ones(3000), async_op=True).get_future()
        future.then(lambda future: kept.append(future.value()[0].sum()))


def replaced_by_exec():
    begin()
    os.execv("/bin/true", ["true"])


# --- the last data of a rank that ends -------------------------------------------------------------------------------


def last_message_arrives(count=COUNT):
    begin()
    if rank == 1:
        kept.append(dist.isend(torch.arange(float(count)), 0))
        return
    time.sleep(0.3)
    got = torch.zeros(count)
    dist.recv(got, 1)
    assert torch.equal(got, torch.arange(float(count)))


def last_small_message_arrives():
    last_message_arrives(10)


def last_sum_arrives():
    begin()
    if rank == 0:
        time.sleep(0.3)
    tensor = torch.arange(float(COUNT))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        work.wait()
        assert torch.equal(tensor, 2 * torch.arange(float(COUNT)))


# --- children by fork ------------------------------------------------------------------------------------------------


def fork(run):
    """Run in a child, which then ends as an interpreter does. In the child: True. In the parent: prints its end."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writable, 1)
        os.dup2(writable, 2)
        os.close(writable)
        signal.alarm(60)
        run()
        return True
    os.close(writable)
    with os.fdopen(readable) as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), said.rstrip())
    return False


def texts_of(*calls):
    for call in calls:
        try:
            call()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print("nothing was raised")


def a_child_uses_the_group():
    begin()
    other = 1 - rank
    tensor = torch.ones(3)
    if rank == 0:
        time.sleep(0.5)
    large = torch.full((COUNT,), 1.0)
    work = dist.all_reduce(large, async_op=True)
    calls = [
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(torch.ones(3, 2)[:, 1], async_op=True),
        lambda: dist.all_gather([tensor, tensor.clone()], tensor),
        lambda: dist.isend(tensor, other),
        lambda: dist.recv(tensor, other),
        dist.barrier,
    ]
    if rank == 1:  # rank 0 has not called yet
        calls += [work.wait, lambda: work.get_future().wait()]
    if not fork(lambda: texts_of(*calls)):
        work.wait()
        assert large.eq(2).all()
        check()


def children_end_in_every_way():
    begin()
    large = torch.full((COUNT,), 1.0)
    future = dist.all_reduce(large, async_op=True).get_future()
    for run in (
        lambda: None,
        lambda: sys.exit(7),
        lambda: os._exit(8),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        dist.destroy_process_group,
        lambda: dist.group.WORLD.abort(),
        lambda: (dist.destroy_process_group(), sys.exit(9)),
    ):
        if fork(run):
            return
    assert future.wait()[0].eq(2).all()
    check()


def a_child_makes_a_world_of_its_own():
    begin()

    def run():
        global name
        dist.destroy_process_group()
        name += "-of-children"
        begin()
        print("works")

    if not fork(run):
        check()


def data_loaders_and_pools_fork():
    begin()
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    for _ in range(2):
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=6, num_workers=2):
            dist.all_reduce(batch.mul_(rank + 1))
            assert batch[1] - batch[0] == 3
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    check()


ROWS = (
    returned, destroyed, exited_with_a_pending_operation, raised_with_a_pending_operation, left_by_os_exit, terminated,
    terminated_with_a_handler, destroyed_in_a_handler, used_at_exit, used_at_exit_after_netfold_ended,
    daemon_threads_go_on, a_thread_goes_on, callbacks_go_on, replaced_by_exec, last_message_arrives,
    last_small_message_arrives, last_sum_arrives, a_child_uses_the_group, children_end_in_every_way,
    a_child_makes_a_world_of_its_own, data_loaders_and_pools_fork,
)  # fmt: skip

torch.set_num_threads(1)
gc.freeze()  # later collections skip what all ranks share
ended = {}
started = {}  # process id -> name, rank
asked = [row for row in ROWS if row.__name__ in (sys.argv[2:] or [row.__name__])]
for at in range(len(asked) + TOGETHER):
    while started and (at >= len(asked) or len(started) > 2 * (TOGETHER - 1)):
        pid, status = os.wait()
        of, number = started.pop(pid)
        with open(f"{folder}/{of}-{number}") as said:
            ended.setdefault(of, [None, None])[number] = [os.waitstatus_to_exitcode(status), said.read()]
    for number in range(2 if at < len(asked) else 0):
        pid = os.fork()
        if pid == 0:
            name, rank = asked[at].__name__, number
            break
        started[pid] = (asked[at].__name__, number)
    if rank >= 0:
        break
if rank >= 0:
    output = os.open(f"{folder}/{name}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(120)
    asked[at]()
else:
    print(json.dumps(ended))
