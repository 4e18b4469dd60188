"""Fake devices. A stream is a list of actions, and no action runs before the host needs its result.

`late`: each copy and each kernel runs at the last moment, when the host queries an event behind it. A read that does
not wait for its event then finds the old values. `early`: every action runs at once, which reveals writes over values
that are still needed. A number seeds a mixture. Memory is the CPU's; a list says which tensors are a device's. Ranks
are threads of one process, and a rank's device is its device_api.

Rules of CUDA and torch that cost a job dearly are checked at each call. `on_devices` fails for `FakeLayer.faults`.

- Devices: no thread may call while its current device is not the tensor's. A thread has none until it chooses one (in
  CUDA it has device 0, and its first call makes a context there).
- Captures: a call that CUDA calls unsafe ends any capture in the global mode, the default, unless the calling thread is
  in the relaxed mode. In any mode, no thread may add work to a captured stream or query an event recorded in it, or use
  the legacy default stream while a blocking stream is captured.
- The legacy default stream: netfold's own threads must not use it. It waits for all blocking streams, the user's among
  them, and may stand at a gate that only the calling thread can open.
- The caching allocator: memory belongs to the stream in which it was allocated. Another stream may use it only after
  `keep` (record_stream): else the memory may be another tensor's while that stream still uses it.
- Exported memory: exporting and closing may block the host until the thread's current stream is done.
- Streams: `pool` streams are handed out in turn, as torch's. Two new streams, or a new one and the user's, may be one.

An event exists only once it was recorded, and is never recorded again: the device API has no other events. So the rules
about such events (a query says done, a wait does nothing, a time is an error) cannot be broken.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_driver import FakeDriver, view_of
from load import seconds

from netfold.torch.device.cuda import wait_for_all
from netfold.torch.memory import writable

# What a kernel returns that cannot end yet.
WAITS = object()

Tensor = torch.Tensor
Order = str | int

_KIND = "cuda"  # torch knows the name without the devices


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int) -> None:
        self.stream = stream
        self.position = position
        self.captured = stream.is_captured()
        self._looks = 2

    @functools.cached_property
    def cuda_event(self) -> int:
        return self.stream.device_api.driver.handle_of_event(self)

    def wait(self, stream: FakeStream) -> None:
        stream.device_api.check_device("cudaStreamWaitEvent", stream.device)
        assert self.stream.device_api is stream.device_api, "an event of another process's"
        stream.give(self)

    def query(self) -> bool:
        device_api = self.stream.device_api
        device_api.check_unsafe("cudaEventQuery", self.stream.device)
        if self.captured:
            device_api.lose_capture("a query of an event in the captured stream")
        with device_api.lock:
            if self.stream.done >= self.position:
                return True
            if device_api.broken:
                raise RuntimeError(device_api.broken)
            if device_api.hangs:
                return False
            self._looks -= 1
            if self._looks < 0 or device_api.chance():
                device_api.force(self.stream, self.position)
            return self.stream.done >= self.position


class FakeStream:
    def __init__(self, device_api: FakeLayer, name: str) -> None:
        self.device_api = device_api
        self.name = name
        self.device = device_api.device  # a stream belongs to one context
        self.to_do: collections.deque[Any] = collections.deque()
        self.given = self.done = 0

    @property
    def is_legacy(self) -> bool:
        return self.name.startswith("default")

    def is_captured(self) -> bool:
        capture = self.device_api.capturing
        return capture is not None and capture.stream is self

    def give(self, work: Any) -> None:
        self.device_api.check_stream(self)
        with self.device_api.lock:
            self.to_do.append(work)
            self.given += 1
            self.device_api.go_on()

    def record_event(self) -> FakeEvent:
        self.device_api.check_device("cudaEventRecord", self.device)
        self.device_api.check_stream(self)
        with self.device_api.lock:
            return FakeEvent(self, self.given)

    def wait_event(self, event: Any) -> None:
        """event: a `FakeEvent`, or a native one of this device."""
        event.wait(self)

    @functools.cached_property
    def cuda_stream(self) -> int:
        return self.device_api.driver.handle_of_stream(self)


class Copy:
    """A copy in a stream."""

    def __init__(self, to: Tensor, source: Tensor, *, native: bool) -> None:
        """native: torch's allocators know nothing of the copy."""
        self.to, self.source, self.native = to, source, native

    def touches(self, begin: int, nbytes: int) -> bool:
        return any(begin <= tensor.data_ptr() < begin + nbytes for tensor in (self.to, self.source))

    def __call__(self) -> None:
        self.to.copy_(self.source)


class FakeGate:
    """A gate as CUDA's stream memory operations make it: the device opens it in a stream's order, or the host does."""

    def __init__(self, device_api: FakeLayer) -> None:
        self._device_api = device_api
        self.opened = False
        self.opening: FakeEvent | None = None

    def hold(self, stream: FakeStream) -> None:
        self._device_api.check_device("cuStreamWaitValue32")

        def wait() -> Any:
            if not self.opened and self.opening is not None:
                self._device_api.force(self.opening.stream, self.opening.position)
            return None if self.opened else WAITS

        stream.give(wait)

    def open_after(self, stream: FakeStream) -> None:
        self._device_api.check_device("cuStreamWriteValue32")
        if self._device_api.broken:
            raise RuntimeError(self._device_api.broken)

        def write() -> None:
            self.opened = True

        stream.give(write)
        self.opening = stream.record_event()

    def open(self) -> None:
        assert self.opening is None, "the device's write would come after this one, and undo a later gate of the word"
        self.opened = True


class FakeFuture(torch.futures.Future[Any]):
    """As torch's Future with `devices`, for waiting in Python."""

    def __init__(self, device_api: FakeLayer, parent: FakeFuture | None = None) -> None:
        super().__init__()
        self.device_api, self.parent = device_api, parent
        self.event: FakeEvent | None = None

    def then(self, callback: Callable[[Any], Any]) -> Any:
        child = FakeFuture(self.device_api, self)

        def run(done: Any) -> None:
            # torch runs callbacks in a stream of their own, which waits for the result.
            with self.device_api.using(self.device_api.make_stream("of a callback")) as stream:
                if self.event is not None:
                    stream.give(self.event)
                try:
                    child.set_result(callback(done))
                except Exception as error:
                    child.set_exception(error)

        super().then(run)
        return child

    def wait(self) -> Any:
        value = super().wait()
        event = self.event if self.parent is None else self.parent.event
        if event is not None:  # torch's Futures choose the device themselves
            self.device_api.current_stream(self.device_api.device).give(event)
        return value


class FakeHost:
    """State that the devices of one machine share: memory that is exported, and which of it may be opened."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the garbage collector may close memory meanwhile
        self.exported: list[Export] = []
        self.communicators: list[Communicator] = []
        self.is_over = threading.Event()  # for ranks to tell each other, beside the group
        self.closed: list[int] = []
        self._free: set[int] = set()  # memory that its owner has freed

    def let_go(self, memory: Tensor) -> None:
        self._free.add(memory.data_ptr())
        self.reuse()

    def reuse(self) -> None:
        """Exported memory that its owner has freed, and that has no reader left, belongs to another tensor."""
        with self.lock:
            used = {each.memory.data_ptr() for each in self.exported if each.users > 0}
            for each in self.exported:
                if each.memory.data_ptr() in self._free - used:
                    each.memory.fill_(0xAA)


class Export:
    """A handle of exported memory. Like torch's, it counts one user, however often it is opened."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.users = 1


class Capture:
    """A graph that a thread captures. blocking: its stream waits for the legacy default stream (cudaStreamDefault)."""

    def __init__(self, mode: str, stream: FakeStream, *, blocking: bool) -> None:
        self.thread = threading.get_ident()
        self.mode = mode
        self.stream = stream
        self.blocking = blocking
        self.lost = ""


class FakeLayer:
    """See `DeviceApi`."""

    kind = _KIND

    def __init__(self, order: Order, number: int = 0, host: FakeHost | None = None) -> None:
        self.order = order
        self.device = torch.device(_KIND, number)
        self.lock = threading.RLock()
        self.host = host if host is not None else FakeHost()
        self.broken = ""  # the error of every call from now on
        self.hangs = False
        self.lingers = False  # NCCL's all-gathers have sent their data, and do not end on this rank
        self.capturing: Capture | None = None
        self.refuses = ""  # the error of opening another rank's memory
        self.hidden: set[int] = set()  # the numbers of devices that this process does not see
        self.pinned_left = 1 << 30
        self.takes_everything = False  # whatever tensor comes is one of the device's
        self.registers = True  # other memory can be pinned
        self.registered: dict[int, torch.device] = {}  # by address
        self.registrations = 0
        self._pinned: dict[int, int] = {}  # bytes by address
        self._sizes: dict[int, int] = {}  # of registered memory
        self._leaked: list[Tensor] = []
        self.no_driver = ""  # why there is no driver library
        self.has_gates = True  # streams can wait for a word of memory
        self.gates: list[FakeGate] = []
        self.faults: list[str] = []  # calls that break a rule
        self.pool = 0  # the number of streams that `new_stream` hands out in turn; 0: each is a new one
        self._pooled: list[FakeStream] = []
        self._turn = 0
        # (memory, stream): uses, and uses that are allowed.
        self._used: set[tuple[int, str]] = set()
        self._kept: set[tuple[int, str]] = set()
        self._random = random.Random(order)
        self._memory: dict[int, Tensor] = {}
        self._streams: list[FakeStream] = []
        self._own = threading.local()
        self._default = self.make_stream("default")

    # --- what tests do ---------------------------------------------------------------------------------------------

    def tensor(self, values: Tensor) -> Tensor:
        """Memory on the device, which holds `values` from the start."""
        made = values.clone()
        self._memory[made.untyped_storage().data_ptr()] = made
        self.keep(made, self.current_stream(self.device))
        return made

    def compute(self, work: Callable[[], Any]) -> None:
        """Add a kernel of the caller to the current stream."""
        self._launch(self.current_stream(self.device), work)

    @contextlib.contextmanager
    def capture(self, mode: str = "global", *, blocking: bool = False) -> Iterator[Capture]:
        """A capture by the calling thread; a call that it forbids ends it, which is an error at its end."""
        with self.using(self.make_stream("captured")) as stream:
            found = self.capturing = Capture(mode, stream, blocking=blocking)
            try:
                yield found
            finally:
                self.capturing = None
        assert not found.lost, f"the capture was ended by {found.lost}"

    @contextlib.contextmanager
    def using(self, stream: FakeStream) -> Iterator[FakeStream]:
        """Make `stream` the calling thread's current stream."""
        before = self.current_stream(self.device)
        self._own.stream = stream
        try:
            yield stream
        finally:
            self._own.stream = before

    def unkept(self) -> list[str]:
        """Uses of memory after which the allocator could give it to another tensor too early."""
        return [f"memory {place:#x} in {stream}, without keep" for place, stream in sorted(self._used - self._kept)]

    def synchronize(self) -> None:
        with self.lock:
            for stream in list(self._streams):
                self.force(stream, stream.given)

    def value(self, tensor: Tensor) -> Tensor:
        """The values that the caller's stream would read, as by `tensor.cpu()`."""
        self._synchronize_current()
        return tensor.clone()

    def _synchronize_current(self) -> None:
        """cudaStreamSynchronize of the calling thread's current stream."""
        stream = self.current_stream(self.device)
        give_up = time.monotonic() + seconds(20)
        while True:  # others' kernels may be waited for
            with self.lock:
                if self.force(stream, stream.given):
                    return
            assert time.monotonic() < give_up, "a kernel waits for another rank's for ever"
            time.sleep(0.0005)

    # --- the device API --------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return self.takes_everything or tensor.untyped_storage().data_ptr() in self._memory

    def device_of(self, tensor: Tensor) -> torch.device:
        return self.device

    def uuid(self, device: torch.device) -> str:
        return f"FAKE-{device.index:04}"

    def visible(self) -> list[str]:
        return [f"FAKE-{number:04}" for number in range(4) if number not in self.hidden]

    def enter(self, device: torch.device) -> None:
        self._own.device, self._own.mode, self._own.is_netfolds = device, "relaxed", True

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before = self.current_device(), self._mode()
        self._own.device, self._own.mode = device, "relaxed"
        try:
            yield
        finally:
            self._own.device, self._own.mode = before

    def current_device(self) -> torch.device | None:
        """The calling thread's."""
        return getattr(self._own, "device", None)

    def _mode(self) -> str:
        return getattr(self._own, "mode", "global")

    def check_device(self, call: str, device: torch.device | None = None) -> None:
        """AssertionError where the calling thread's current device is not the one that the call is for."""
        device = device or self.device
        if self.current_device() != device:
            self.fault(f"{call} for {device} on a thread whose current device is {self._named()}")

    def check_stream(self, stream: FakeStream) -> None:
        """AssertionError, or RuntimeError of a capture, where the calling thread may not use the stream."""
        if stream.is_legacy and getattr(self._own, "is_netfolds", False):
            self.fault(f"{threading.current_thread().name} uses the legacy default stream")
        capture = self.capturing
        if capture is None:
            return
        if stream is capture.stream and capture.thread != threading.get_ident():
            self.lose_capture(f"work of {threading.current_thread().name} in the captured stream")
        if stream.is_legacy and capture.blocking:
            self.lose_capture(f"the legacy stream's use by {threading.current_thread().name}")

    def lose_capture(self, how: str) -> None:
        if self.capturing is not None:
            self.capturing.lost = how
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {how}")

    def fault(self, what: str) -> None:
        self.faults.append(what)
        raise AssertionError(what)

    def check_unsafe(self, call: str, device: torch.device | None = None) -> None:
        """RuntimeError, and no capture, where another thread captures, or the calling one, and forbids the call."""
        self.check_device(call, device)
        capture = self.capturing
        if capture is None or self._mode() == "relaxed" or capture.mode == "relaxed":
            return
        if capture.mode == "global" or capture.thread == threading.get_ident():
            self.lose_capture(f"{call} of {threading.current_thread().name}")

    def _named(self) -> str:
        return str(self.current_device() or "not chosen")

    def current_stream(self, device: torch.device) -> FakeStream:
        stream: FakeStream = getattr(self._own, "stream", self._default)
        if stream.device != device:
            # Each device has a default stream of its own.
            stream = next((each for each in self._streams if each.name == f"default of {device}"), None) or FakeStream(
                self, f"default of {device}"
            )
            stream.device = device
            if stream not in self._streams:
                self._streams.append(stream)
        return stream

    def captures(self) -> bool:
        self.check_device("cudaStreamIsCapturing")
        return self.capturing is not None and self.capturing.thread == threading.get_ident()

    def new_stream(self, device: torch.device) -> FakeStream:
        self.check_unsafe("cudaStreamCreate")
        if not self.pool:
            return self.make_stream()
        if len(self._pooled) < self.pool:
            self._pooled.append(self.make_stream("of the pool"))
        self._turn += 1
        return self._pooled[self._turn % len(self._pooled)]

    def make_stream(self, what: str = "stream") -> FakeStream:
        stream = FakeStream(self, f"{what} {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def launch(self, stream: FakeStream, work: Callable[[], Any]) -> None:
        self.check_device("cudaLaunchKernel")
        self.use(stream, *_captured_tensors(work))
        self._launch(stream, work)

    def _launch(self, stream: FakeStream, work: Callable[[], Any]) -> None:
        def run() -> None:
            with self.using(stream), writable():
                work()

        stream.give(run)

    @functools.cached_property
    def driver(self) -> FakeDriver:
        return FakeDriver(self)

    def native_driver(self, device: torch.device) -> Any:
        if self.no_driver:
            raise RuntimeError(self.no_driver)
        return self.driver.native

    def memory_at(self, address: int, nbytes: int) -> Tensor:
        """[nbytes] u8: memory of this device."""
        for begin, tensor in list(self._memory.items()):
            storage = tensor.untyped_storage()
            if begin <= address and address + nbytes <= begin + storage.nbytes():
                return torch.empty(0, dtype=torch.uint8).set_(storage, address - begin, (nbytes,))
        assert self.takes_everything, f"{nbytes} bytes at {address:#x} are not of {self.device}"
        return view_of(address, nbytes)

    def pinned_at(self, address: int, nbytes: int) -> Tensor:
        """[nbytes] u8: memory of the host that is pinned: a copy of other memory would block the host."""
        pinned = {**self._pinned, **{begin: self._sizes[begin] for begin in self.registered}}
        assert any(begin <= address and address + nbytes <= begin + size for begin, size in pinned.items()), (
            f"{nbytes} bytes at {address:#x} are not pinned"
        )
        return view_of(address, nbytes)

    def copy(self, stream: FakeStream, to: Tensor, source: Tensor) -> None:
        self.check_device("cudaMemcpyAsync")
        if self.broken:
            raise RuntimeError(self.broken)
        self.use(stream, to, source)
        # A copy engine holds nothing: what it reads may be closed.
        to, source = _raw(to), _raw(source)
        stream.give(Copy(to, source, native=self.driver.copies_here))

    def pinned(self, nbytes: int) -> Tensor:
        self.check_unsafe("cudaHostAlloc")
        if nbytes > self.pinned_left:
            raise RuntimeError("out of pinned memory")
        self.pinned_left -= nbytes
        made = torch.empty(nbytes, dtype=torch.uint8)
        self._pinned[made.data_ptr()] = nbytes
        weakref.finalize(made, self._free_pinned, made.data_ptr(), made[:]).atexit = False
        return made

    def _free_pinned(self, begin: int, memory: Tensor) -> None:
        """torch's allocator keeps pinned memory until its own copies are done."""
        if any(copy.native and copy.touches(begin, memory.nbytes) for copy in self._copies()):
            self.faults.append("pinned memory is freed before a copy that torch does not know")
            self._leaked.append(memory)
        self._pinned.pop(begin, None)

    def _copies(self) -> list[Copy]:
        with self.lock:
            return [each for stream in self._streams for each in stream.to_do if isinstance(each, Copy)]

    def register(self, memory: Tensor) -> bool:
        self.check_unsafe("cuMemHostRegister")
        if not self.registers:
            return False
        if memory.nbytes > self.pinned_left:
            raise RuntimeError("CUDA driver error 2")
        self.pinned_left -= memory.nbytes
        assert memory.data_ptr() not in self.registered, "registered twice"
        self.registered[memory.data_ptr()] = self.device
        self._sizes[memory.data_ptr()] = memory.nbytes
        self.registrations += 1
        return True

    def unregister(self, memory: Tensor) -> None:
        begin = memory.data_ptr()
        self.check_unsafe("cuMemHostUnregister", self.registered[begin])
        assert not any(copy.touches(begin, memory.nbytes) for copy in self._copies()), (
            "memory of a copy that is still to come"
        )
        del self.registered[begin]
        self.pinned_left += memory.nbytes

    def empty(self, stream: FakeStream, nbytes: int) -> Tensor:
        self.check_device("cudaMallocAsync")
        made = self.tensor(torch.full((nbytes,), 0x55, dtype=torch.uint8))
        self.keep(made, stream)
        held = made[:]
        weakref.finalize(held, self.host.let_go, made).atexit = False
        return held

    def keep(self, tensor: Tensor, stream: FakeStream) -> None:
        self._kept.add((tensor.untyped_storage().data_ptr(), stream.name))

    def use(self, stream: FakeStream, *tensors: Tensor) -> None:
        """Note that the stream's work uses the tensors' memory, where it is this device's."""
        for tensor in tensors:
            place = tensor.untyped_storage().data_ptr()
            if tensor.nbytes and place in self._memory:
                self._used.add((place, stream.name))

    def export(self, stream: FakeStream, tensor: Tensor) -> dict[str, Any]:
        self.check_unsafe("cudaIpcGetMemHandle")
        with self.using(stream):
            self._synchronize_current()  # torch does after 1000 exports, and always on ROCm
        with self.host.lock:
            self.host.exported.append(Export(_raw(tensor)))
            return {"number": len(self.host.exported) - 1}

    def open(self, handle: dict[str, Any], device: torch.device) -> Tensor:
        self.check_unsafe("cudaIpcOpenMemHandle")
        if self.refuses:
            raise RuntimeError(self.refuses)
        opened = _raw(self.host.exported[handle["number"]].memory)
        weakref.finalize(opened, self._close_one, handle, device).atexit = False
        return opened

    def close(self, stream: FakeStream, windows: list[Tensor]) -> None:
        self.check_unsafe("cudaIpcCloseMemHandle")
        with self.using(stream):
            windows.clear()

    def _close_one(self, handle: dict[str, Any], device: torch.device) -> None:
        """Close an opened window, as the end of torch's tensor does."""
        self.check_stream(self.current_stream(self.device))
        self._synchronize_current()
        self.decline(handle, device)

    def decline(self, handle: dict[str, Any], device: torch.device) -> None:
        self.host.exported[handle["number"]].users -= 1
        self.host.reuse()

    def new_gate(self, device: torch.device) -> FakeGate | None:
        self.check_unsafe("cudaHostAlloc")
        if not self.has_gates:
            return None
        self.gates.append(FakeGate(self))
        return self.gates[-1]

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        return FakeFuture(self)

    def resolve(self, stream: FakeStream, future: Any, value: Any) -> None:
        self.check_device("cudaEventRecord")
        if self.broken:
            raise RuntimeError(self.broken)
        future.event = stream.record_event()
        future.set_result(value)

    def nccl(self, device: torch.device, store: Any, rank: int, size: int) -> Any:
        self.check_unsafe("ncclCommInitRank")
        if rank == 0:
            with self.host.lock:
                self.host.communicators.append(Communicator(size))
                store.set("communicator", str(len(self.host.communicators) - 1))
        return FakeNccl(self, self.host.communicators[int(store.get("communicator"))], store, rank)

    # --- the order -------------------------------------------------------------------------------------------------

    def chance(self) -> bool:
        return isinstance(self.order, int) and self._random.random() < 0.3

    def go_on(self) -> None:
        """After a new action: run as many of the pending actions as the mode says."""
        if self.order == "early":
            self.synchronize()
        elif self.order != "late":
            for _ in range(self._random.randrange(3)):
                stream = self._random.choice(self._streams)
                if stream.done < stream.given:
                    self.force(stream, stream.done + 1)

    def force(self, stream: FakeStream, position: int) -> bool:
        """Run the actions up to that point; False where a kernel between waits for another rank's."""
        while stream.done < position:
            work = stream.to_do[0]
            if self.force(work.stream, work.position) if isinstance(work, FakeEvent) else work() is not WAITS:
                stream.to_do.popleft()
                stream.done += 1
            else:
                return False
        return True


class Communicator:
    """The shared state of the members of an NCCL communicator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.given = [0] * size  # collectives, by rank
        self.done = [0] * size
        self.sources: list[dict[int, Tensor]] = []  # by collective: what ranks' kernels gave
        self.gone: dict[int, str] = {}  # ranks that aborted or destroyed it
        self.cut_off: list[str] = []  # collectives that lost what they read, by no abort of their rank's own


class FakeNccl:
    """A collective is done once all ranks' streams have reached it. A rank that leaves earlier removes its data."""

    def __init__(self, device_api: FakeLayer, among: Communicator, store: Any, rank: int) -> None:
        self._device_api, self._among, self._store, self._rank = device_api, among, store, rank
        self._aborted = False

    def reduce_scatter(self, stream: FakeStream, output: Tensor, source: Tensor, reduce: str) -> None:
        add = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}[reduce]

        def run(sources: list[Tensor]) -> None:
            shards = [each.view(self._among.size, -1)[self._rank] for each in sources]
            output.copy_(functools.reduce(add, shards).view_as(output))

        self._give(stream, output, source, run, gathers=False)

    def all_gather(self, stream: FakeStream, output: Tensor, source: Tensor) -> None:
        self._give(stream, output, source, lambda sources: output.copy_(torch.cat(sources)), gathers=True)

    def _give(
        self, stream: FakeStream, output: Tensor, source: Tensor, run: Callable[[list[Tensor]], Any], *, gathers: bool
    ) -> None:
        self._device_api.check_device("ncclCollective")
        self._device_api.use(stream, output, source)
        _check_nccl_dtype(output)
        among, rank = self._among, self._rank
        with among.lock:
            number = among.given[rank]
            among.given[rank] += 1
            while len(among.sources) <= number:
                among.sources.append({})

        def kernel() -> Any:
            with among.lock:
                given = among.sources[number]
                if self._aborted or (len(given) == among.size and among.gone):
                    if not self._aborted:
                        among.cut_off.append(f"collective {number} of rank {rank}, by {among.gone}")
                    output.view(torch.uint8).fill_(0x55)
                    among.done[rank] += 1
                    return None
                given.setdefault(rank, source.clone())
                if len(given) < among.size or (gathers and self._device_api.lingers):
                    return WAITS
                run([given[each] for each in range(among.size)])
                among.done[rank] += 1
                return None

        stream.give(kernel)

    def abort(self, reason: str) -> None:
        self._aborted = True
        self._among.gone[self._rank] = "an abort"
        wait_for_all(self._store, self._among.size, 0)

    def close(self, wait_s: float) -> None:
        assert self._among.done[self._rank] == self._among.given[self._rank], "closed before its own device was done"
        wait_for_all(self._store, self._among.size, wait_s)
        with self._among.lock:
            if self._among.done != self._among.given:
                self._among.gone[self._rank] = "a close"


def _raw(tensor: Tensor) -> Tensor:
    """The memory, without what keeps it open."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _check_nccl_dtype(tensor: Tensor) -> None:
    """TypeError as ProcessGroupNCCL's, for what has no ncclDataType_t."""
    if tensor.dtype in (torch.int16, torch.complex64, torch.complex128):
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


def _captured_tensors(work: Callable[[], Any]) -> list[Tensor]:
    """The dense tensors in a function's closure."""
    values = [cell.cell_contents for cell in getattr(work, "__closure__", None) or ()]
    found = []
    while values:
        value = values.pop()
        if isinstance(value, list | tuple):
            values.extend(value)
        elif isinstance(value, torch.Tensor) and not value.is_sparse:
            found.append(value)
    return found
