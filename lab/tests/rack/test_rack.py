"""A running rack: its rate, its loss, and its complete removal. Needs root."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from endings import has_ended
from load import run, seconds

from netfold_lab.rack import Rack, RackError, cleanup, names
from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.delay_links import DelayLinks
from netfold_lab.rack.processes import Process, spawn, supervise
from netfold_lab.rack.topology import End

LACK = why_unavailable(loss=True, delay=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

# Payload of a full packet as a share of what the shaper counts: less Ethernet, IPv4 and TCP with timestamps.
TCP_SHARE = 1448 / 1514

SEND_TCP = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as link:
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        link.sendall(bytes(1 << 18))
"""

RECEIVE_TCP = """
import json, socket, time
with socket.create_server(("0.0.0.0", 5001)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    received, started = 0, time.monotonic()
    while data := link.recv(1 << 20):
        received += len(data)
    print(json.dumps({"bytes": received, "seconds": time.monotonic() - started}))
"""

# Datagrams leave as super-packets of 16 (UDP_SEGMENT), each with its number in front.
SEND_UDP = """
import socket, struct, sys, time
target, count, each = (sys.argv[1], 5002), int(sys.argv[2]), 1000
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    # The kernel queues packets until the first ARP answer comes, and may send a later packet before it has emptied that
    # queue. So wait for an echo first.
    link.settimeout(0.2)
    while True:
        link.sendto(b"echo", target)
        try:
            if link.recv(64) == b"echo":
                break
        except TimeoutError:
            pass
    link.settimeout(None)
    link.setsockopt(17, 103, each)
    for first in range(0, count, 16):
        link.sendto(b"".join(struct.pack(">I", first + i).ljust(each, b".") for i in range(16)), target)
        time.sleep(0.0005)
    time.sleep(0.5)
    link.sendto(b"end", target)
    time.sleep(0.1)
    for _ in range(20):
        link.sendto(b"end", target)
"""

RECEIVE_UDP = """
import json, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    # SO_RCVBUFFORCE: nothing is to be lost for want of room here.
    link.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
    link.bind(("0.0.0.0", 5002))
    print("ready", flush=True)
    numbers = []
    while (data := (received := link.recvfrom(2048))[0]) != b"end":
        if data == b"echo":
            link.sendto(data, received[1])
        else:
            numbers.append(struct.unpack(">I", data[:4])[0])
    print(json.dumps(numbers))
"""


def last_line(process: Process) -> str:
    output, _ = process.communicate(timeout=seconds(60))
    assert process.returncode == 0, output
    return output.splitlines()[-1]


def await_ready(process: Process) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def no_rack_is_left(rack_id: str) -> bool:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return rack_id not in listed and rack_id not in cleanup.racks()


def rack_id_in(process: Process) -> str:
    """The id of the rack of a `netfold rack run`, from the name of a host's namespace."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"h\d+\| nf-([0-9a-f]+)-h\d+$", line.rstrip()):
            return match[1]
    raise AssertionError("no host printed its namespace")


def rack_run(*command: str, hosts: int = 2, options: tuple[str, ...] = ("--no-switch",)) -> Process:
    verb = [sys.executable, "-m", "netfold.cli", "rack", "run", "--hosts", str(hosts), "--rate", "1gbit", *options]
    return spawn([*verb, "--", *command], os.environ)


@pytest.mark.parametrize(("rate", "loss"), [("200mbit", "0%"), ("1gbit", "0%"), ("200mbit", "0.0001%")])
def test_tcp_between_two_hosts_runs_at_the_requested_rate(rate: str, loss: str) -> None:
    with Rack(2, rate, loss) as rack:
        receiver = rack.popen(1, [sys.executable, "-c", RECEIVE_TCP])
        await_ready(receiver)
        sender = rack.popen(0, [sys.executable, "-c", SEND_TCP, names.host_address(1), "2"])
        measured = json.loads(last_line(receiver))
        assert supervise([sender], deadline_s=10).exit_code == 0
        line_bits = rack.link.rate_bits * TCP_SHARE
    goodput_bits = measured["bytes"] * 8 / measured["seconds"]
    # At most both ends' bursts above the line rate; below it by the cost of a busy machine.
    assert goodput_bits <= line_bits + 2 * 8 * (128 << 10) / measured["seconds"]
    assert goodput_bits >= 0.75 * line_bits


@pytest.mark.parametrize("up", [True, False], ids=["to_the_switch", "from_the_switch"])
def test_a_link_loses_single_packets_at_the_requested_ratio_each_way(up: bool) -> None:
    count, loss_ratio = 32000, 0.02
    receive, send = [sys.executable, "-c", RECEIVE_UDP], [sys.executable, "-c", SEND_UDP]
    # Three hosts, so that a rule that also applies to other links would show.
    with Rack(3, "1gbit", "2%") as rack:
        if up:
            receiver = rack.popen_switch(receive)
            await_ready(receiver)
            rack.popen(0, [*send, names.SWITCH_ADDRESS, str(count)])
        else:
            receiver = rack.popen(0, receive)
            await_ready(receiver)
            rack.popen_switch([*send, names.host_address(0), str(count)])
        arrived = set(json.loads(last_line(receiver)))
    lost = [number for number in range(count) if number not in arrived]
    # Binomial: one run in about two million is further than five standard deviations from the mean.
    allowed = 5 * math.sqrt(count * loss_ratio * (1 - loss_ratio))
    assert abs(len(lost) - count * loss_ratio) < allowed
    # A super-packet lost as a whole takes its 16 datagrams with it. Where single packets are lost, the probability of a
    # second loss in one super-packet is below 15 * 2%, so far more than half of the hit ones lose only one.
    hit = [number // 16 for number in lost]
    assert sum(hit.count(which) == 1 for which in set(hit)) > len(set(hit)) / 2


def test_a_rack_and_its_processes_are_removed_after_its_with_block() -> None:
    with Rack(2, "1gbit") as rack:
        processes = [rack.popen(0, ["sleep", "60"]), rack.popen_switch(["sleep", "60"])]
        assert not no_rack_is_left(rack.rack_id)
    assert all(process.poll() is not None for process in processes)
    assert no_rack_is_left(rack.rack_id)


def test_a_rack_that_cannot_be_built_is_removed() -> None:
    rack = Rack(2, "1gbit")
    taken = names.host_namespace(rack.rack_id, 1)
    subprocess.run(["ip", "netns", "add", taken], check=True)
    with pytest.raises(RackError, match=taken), rack:
        pass
    assert no_rack_is_left(rack.rack_id)


def test_a_process_that_left_its_parent_is_also_ended() -> None:
    with Rack(1, "1gbit") as rack:
        parent = rack.popen(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"])
        orphan = int(last_line(parent))
        assert not has_ended(orphan)
    assert has_ended(orphan)


def test_workers_get_the_address_of_a_process_that_replaces_the_switch() -> None:
    script = "print('netfold switch listening on 10.77.0.254:7171', flush=True); import time; time.sleep(60)"
    with Rack(1, "1gbit") as rack:
        rack.start_switch(lambda line: None, [sys.executable, "-c", script])
        assert last_line(rack.popen(0, ["sh", "-c", "echo $NETFOLD_SWITCH"])) == "10.77.0.254:7171"


def test_the_aggregator_serves_workers_in_a_rack() -> None:
    with Rack(2, "1gbit") as rack:
        lines: list[str] = []
        rack.start_switch(lines.append)
        code = (
            "import torch, torch.distributed as dist; dist.init_process_group('netfold'); "
            "x = torch.arange(100000.) + dist.get_rank(); dist.all_reduce(x); "
            "assert torch.equal(x, 2 * torch.arange(100000.) + 1); dist.destroy_process_group()"
        )
        workers = [rack.popen(host, [sys.executable, "-c", code]) for host in range(2)]
        outcome = supervise(workers, deadline_s=60)
        outputs = [worker.communicate()[0] for worker in workers]
    assert outcome.exit_code == 0, (outputs, lines)


def test_run_streams_with_the_hosts_names_and_returns_the_first_failure() -> None:
    process = rack_run("sh", "-c", 'ip netns identify; [ "$RANK" = 0 ] || exit 5; sleep 60')
    rack_id = rack_id_in(process)
    output, _ = process.communicate(timeout=seconds(30))
    assert process.returncode == 5
    assert "host h1 failed first, with exit code 5" in output
    assert no_rack_is_left(rack_id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    process = rack_run("sh", "-c", "ip netns identify; sleep 60")
    rack_id = rack_id_in(process)
    process.send_signal(number)
    process.communicate(timeout=seconds(30))
    assert process.returncode == 128 + number
    assert no_rack_is_left(rack_id)


def reaper_of(rack_id: str) -> int:
    (found,) = subprocess.run(["pgrep", "-f", f"reaper.*{rack_id}"], capture_output=True).stdout.split()
    return int(found)


def removed_within_s(rack_id: str, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not no_rack_is_left(rack_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    return no_rack_is_left(rack_id)


def test_nothing_is_left_of_a_rack_whose_process_was_killed() -> None:
    process = rack_run("sh", "-c", "ip netns identify; trap '' TERM; sleep 60")
    rack_id = rack_id_in(process)
    reaper = reaper_of(rack_id)
    process.kill()
    process.wait()
    # The hosts' processes ignore SIGTERM.
    assert removed_within_s(rack_id, 20)
    deadline = time.monotonic() + 5
    while not has_ended(reaper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended(reaper)


def test_a_process_that_a_killed_rack_forked_does_not_keep_the_rack() -> None:
    code = """if True:
        import os, sys, time
        from netfold_lab.rack import Rack
        with Rack(1, "1gbit") as rack:
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            print(rack.rack_id, flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    rack_id = process.stdout.readline().strip()
    try:
        process.kill()
        process.wait()
        assert removed_within_s(rack_id, 20)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_down_removes_the_rest_of_a_killed_rack_and_spares_a_running_one() -> None:
    with Rack(1, "1gbit") as living:
        process = rack_run("sh", "-c", "ip netns identify; sleep 60")
        rack_id = rack_id_in(process)
        os.kill(reaper_of(rack_id), signal.SIGKILL)
        process.kill()
        process.wait()
        assert not no_rack_is_left(rack_id)
        verb = [sys.executable, "-m", "netfold.cli", "rack", "down"]
        done = run(verb, 60, check=True)
        assert f"rack {rack_id} removed" in done.stdout
        assert f"rack {living.rack_id} still runs under process {os.getpid()}" in done.stdout
        assert no_rack_is_left(rack_id)
        assert not no_rack_is_left(living.rack_id)
        # The running rack still works.
        assert supervise([living.popen(0, ["true"])], deadline_s=10).exit_code == 0
    deadline = time.monotonic() + 5
    while not no_rack_is_left(living.rack_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert no_rack_is_left(living.rack_id)


def test_several_racks_pass_the_check() -> None:
    verb = [sys.executable, "-m", "netfold.cli", "rack", "check", "--hosts", "4", "--rate", "400mbit"]
    more = ["--racks", "2", "--uplink", "100mbit", "--mtu", "4000", "--loss", "0.5%"]
    done = run([*verb, *more], 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as asked") == 12


def test_the_aggregator_may_be_a_host_behind_its_own_link() -> None:
    verb = [sys.executable, "-m", "netfold.cli", "rack", "check", "--rate", "400mbit", "--switch-rate", "100mbit"]
    done = run(verb, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "96 Mbit/s" in done.stdout  # 1448 of 1514 bytes, of 100 Mbit/s


def test_a_delay_passes_the_check_together_with_loss_and_rate() -> None:
    verb = [sys.executable, "-m", "netfold.cli", "rack", "check", "--rate", "100mbit", "--delay", "2ms", "--loss", "1%"]
    done = run(verb, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as asked") == 8


@pytest.mark.native
def test_all_super_packets_through_a_delayed_link_arrive_in_order() -> None:
    with Rack(2, "1gbit", delay="1ms") as rack:
        receiver = rack.popen(1, [sys.executable, "-c", RECEIVE_UDP])
        await_ready(receiver)
        sender = rack.popen(0, [sys.executable, "-c", SEND_UDP, names.host_address(1), "3200"])
        assert sender.wait(timeout=seconds(60)) == 0
        assert json.loads(last_line(receiver)) == list(range(3200))


def test_packets_through_delayed_links_arrive_whole_and_the_switch_sums_them() -> None:
    code = (
        "import torch, torch.distributed as dist; dist.init_process_group('netfold'); "
        "x = torch.arange(300000.) + dist.get_rank(); dist.all_reduce(x); "
        "assert torch.equal(x, 3 * torch.arange(300000.) + 3); print('whole'); dist.destroy_process_group()"
    )
    process = rack_run(sys.executable, "-c", code, hosts=3, options=("--delay", "200us", "--racks", "1"))
    output = process.communicate(timeout=seconds(120))[0]
    assert process.returncode == 0, output
    assert output.count("whole") == 3


def test_a_delayed_link_into_a_missing_namespace_is_refused_with_its_name() -> None:
    with pytest.raises(RackError, match="nf-no-such"):
        DelayLinks().add(End("nf-no-such", "a"), End("nf-no-such", "b"), 1000)


def test_several_racks_have_a_leaf_each_if_requested() -> None:
    code = (
        "import os, torch, torch.distributed as dist; dist.init_process_group('netfold'); "
        "x = torch.arange(100000.) + dist.get_rank(); dist.all_reduce(x); "
        "assert torch.equal(x, 4 * torch.arange(100000.) + 6); print('through', os.environ['NETFOLD_SWITCH']); "
        "dist.destroy_process_group()"
    )
    racks = ("--racks", "2", "--uplink", "400mbit", "--leaves")
    process = rack_run(sys.executable, "-c", code, hosts=4, options=racks)
    output = process.communicate(timeout=seconds(120))[0]
    assert process.returncode == 0, output
    for host, rack in enumerate((0, 0, 1, 1)):
        assert f"h{host}| through {names.rack_address(rack)}:{names.SWITCH_PORT}" in output, output
    # Both leaves sent sums to the parent.
    assert len(re.findall(r"leaf\| .*event=started .*parent=", output)) == 2, output


def test_leaves_need_several_racks_and_a_switch_above() -> None:
    with Rack(2, "1gbit") as rack, pytest.raises(RackError, match="several racks"):
        rack.start_leaves(lambda line: None)
