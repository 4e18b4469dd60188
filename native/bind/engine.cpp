// netfold._native.engine: groups and operations. Every wait releases the GIL.
#include <fcntl.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>
#include <netfold/collective/registry.hpp>
#include <netfold/engine/compute_sampler.hpp>
#include <netfold/engine/engine.hpp>
#include <netfold/transport/tcp/tcp_pipe.hpp>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "auth.hpp"
#include "call_site.hpp"
#include "fabric.hpp"
#include "module.hpp"
#include "transport.hpp"

namespace nb = nanobind;
using namespace netfold;
using engine::Engine;
using engine::Group;
using engine::Operation;

namespace {

// (address, bytes): the caller keeps the memory alive until the operation is done.
using Region = std::tuple<std::uintptr_t, std::size_t>;

std::vector<collective::Buffer> buffers(const std::vector<Region>& regions) {
  std::vector<collective::Buffer> out;
  out.reserve(regions.size());
  for (const auto& [address, bytes] : regions) out.push_back({reinterpret_cast<std::byte*>(address), bytes});
  return out;
}

std::vector<transport::Fd> owned(const std::vector<int>& fds) {
  std::vector<transport::Fd> out;
  for (const int fd : fds) out.emplace_back(fd);
  return out;
}

// The connections to each rank, by rail: none to this rank itself.
using Connections = std::vector<std::vector<int>>;

// By lane, rank and rail, as the connections; empty for plain bytes.
using Secrets = std::vector<std::vector<std::vector<PythonSecrets>>>;

// Of the connections to one rank, in one lane.
std::vector<auth::StreamSecrets> secrets_to(const Secrets& secrets, int lane, std::size_t peer, std::size_t rails) {
  if (secrets.empty()) return {};
  const auto& given = secrets.at(static_cast<std::size_t>(lane)).at(peer);
  if (given.size() != rails) throw nb::value_error("every connection needs secrets, or none does");
  std::vector<auth::StreamSecrets> out;
  for (const auto& each : given) out.push_back(secrets_of(each));
  return out;
}

// `fabric`: by lane and rank, streams to go over in the place of the connections; empty where there are none.
std::unique_ptr<transport::Mesh> make_mesh(int rank, const Connections& fds, const std::vector<bool>& resumable,
                                           std::uint64_t group, int lane, const Secrets& secrets,
                                           const nb::list& fabric) {
  std::vector<std::unique_ptr<transport::Pipe>> pipes;
  for (std::size_t peer = 0; peer < fds.size(); ++peer) {
    std::function<void(int)> on_broken;
    if (resumable[peer]) {
      on_broken = [group, lane, peer](int rail) {
        Engine::instance().post_event({.kind = engine::AsyncEvent::Kind::broken,
                                       .group = group,
                                       .ranks = {static_cast<int>(peer)},
                                       .lane = lane,
                                       .rail = rail});
      };
    }
    std::unique_ptr<transport::Pipe> pipe;
    if (!fds[peer].empty()) {
      pipe = std::make_unique<transport::TcpPipe>(owned(fds[peer]), secrets_to(secrets, lane, peer, fds[peer].size()),
                                                  std::move(on_broken));
    }
    if (pipe != nullptr && nb::len(fabric) > 0) {
      auto stream = std::move(nb::cast<FabricStream&>(fabric[lane][peer]).pipe);
      if (stream == nullptr) throw nb::value_error("this stream was given to a group before");
      stream->watch(std::move(pipe));
      pipe = std::move(stream);
    }
    pipes.push_back(std::move(pipe));
  }
  return std::make_unique<transport::Mesh>(rank, std::move(pipes));
}

// As Python has it: (operation, bytes from which on, algorithm, wire, algorithm between hosts).
using TableRow = std::tuple<int, std::uint64_t, int, int, int>;

std::vector<engine::Choice> table_of(const std::vector<TableRow>& rows) {
  std::vector<engine::Choice> table;
  for (const auto& [kind, min_bytes, algorithm, wire, between] : rows) {
    if (kind < 0 || kind >= collective::kKindCount || algorithm < 0 || algorithm >= collective::kAlgorithmCount ||
        between < 0 || between >= collective::kAlgorithmCount || wire >= kernels::kDTypeCount) {
      throw nb::value_error("the choice table names an operation, algorithm or wire format that does not exist");
    }
    table.push_back({static_cast<collective::Kind>(kind), min_bytes, static_cast<collective::AlgorithmId>(algorithm),
                     wire, static_cast<collective::AlgorithmId>(between)});
  }
  return table;
}

std::shared_ptr<Group> make_group(int rank, const Connections& fds, const Connections& lane_fds,
                                  const std::vector<Connections>& fallback_fds, std::vector<bool> resumable,
                                  std::uint64_t id, std::string job, int spin_us, bool spins_for_sockets, bool yields,
                                  const std::vector<TableRow>& table, std::uint16_t table_hash, std::vector<int> nodes,
                                  const nb::list& fabric, const Secrets& secrets) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= fds.size()) throw nb::value_error("rank is not one of the group's");
  const auto fits = [&](const Connections& lane) { return lane.size() == fds.size(); };
  if (!fits(lane_fds) || !std::all_of(fallback_fds.begin(), fallback_fds.end(), fits)) {
    throw nb::value_error("every lane needs as many places as there are ranks");
  }
  resumable.resize(fds.size());
  if (nodes.size() != fds.size()) throw nb::value_error("every rank is on some node");
  Group::Options options{.id = id,
                         .job = std::move(job),
                         .spin_us = spin_us,
                         .spins_for_sockets = spins_for_sockets,
                         .yields = yields,
                         .table = table_of(table),
                         .table_hash = table_hash,
                         .nodes = std::move(nodes)};
  auto mesh = make_mesh(rank, fds, resumable, id, 0, secrets, fabric);
  auto lane = make_mesh(rank, lane_fds, resumable, id, 1, secrets, fabric);
  std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes;
  for (const Connections& fallback : fallback_fds) {
    fallback_meshes.push_back(
        make_mesh(rank, fallback, resumable, id, 2 + static_cast<int>(fallback_meshes.size()), secrets, fabric));
  }
  nb::gil_scoped_release release;
  return Engine::instance().add_group(std::move(options), std::move(mesh), std::move(lane), std::move(fallback_meshes));
}

// A group's way to one of its switches, by the order in which they were attached.
struct Shard {
  std::shared_ptr<Group> group;
  std::size_t number;
};

nb::object traffic_of(const Shard& shard) {
  const auto all = shard.group->traffic();
  if (shard.number >= all.size()) return nb::none();
  const Group::Traffic& traffic = all[shard.number];
  nb::dict out;
  out["generation"] = traffic.generation;
  out["packets_sent"] = traffic.packets_sent;
  out["retransmissions"] = traffic.retransmissions;
  out["smoothed_rtt_ns"] = traffic.smoothed_rtt_ns;
  out["oldest_outstanding"] = traffic.oldest_outstanding;
  out["idle"] = traffic.idle;
  out["path_error"] = traffic.path_error;
  out["send_error"] = traffic.send_error;
  nb::dict drops;
  for (int i = 1; i < protocol::kDropCount; ++i) {
    drops[protocol::name(static_cast<protocol::Drop>(i))] = traffic.drops[i];
  }
  out["drops"] = drops;
  return out;
}

using Keys = std::tuple<nb::bytes, nb::bytes>;  // of this worker's contributions, of the answers

std::unique_ptr<collective::Channel> make_channel(const Group& group, DataPort& port, std::uint64_t generation,
                                                  const protocol::WorkerConfig& config, const std::vector<int>& ranks,
                                                  const std::optional<Keys>& keys, bool encrypts) {
  const auto security = encrypts ? auth::Security::encrypt : auth::Security::authenticate;
  std::optional<collective::ChannelKeys> channel_keys;
  if (keys) channel_keys = {key_of(std::get<0>(*keys)), key_of(std::get<1>(*keys)), security};
  return std::make_unique<collective::Channel>(generation, config, channel_keys, ranks, group.rank(), port.take(),
                                               port.to);
}

nb::bytes as_bytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// (base, end, held, promised), see collective::Channel::receive_state; None: no such membership.
nb::object freeze_generation(const Shard& shard, std::uint64_t generation) {
  std::optional<collective::SwitchPath::FrozenState> state;
  {
    nb::gil_scoped_release release;
    shard.group->on_switch_path(shard.number, [&](collective::SwitchPath& path) { state = path.freeze(generation); });
  }
  if (!state) return nb::none();
  const auto& received = state->channel;
  return nb::make_tuple(received.base, received.end, as_bytes(received.held), state->promised);
}

nb::object kept_packets(const Shard& shard, std::uint64_t generation, const std::vector<std::uint64_t>& chunks) {
  std::optional<std::vector<std::vector<std::byte>>> packets;
  {
    nb::gil_scoped_release release;
    shard.group->on_switch_path(shard.number,
                                [&](collective::SwitchPath& path) { packets = path.kept(generation, chunks); });
  }
  if (!packets) return nb::none();
  nb::list out;
  for (const auto& packet : *packets) out.append(as_bytes(packet));
  return out;
}

bool accept_packets(const Shard& shard, std::uint64_t generation, const std::vector<nb::bytes>& packets) {
  std::vector<std::span<const std::byte>> views;
  for (const nb::bytes& packet : packets) {
    views.emplace_back(reinterpret_cast<const std::byte*>(packet.c_str()), packet.size());
  }
  nb::gil_scoped_release release;
  bool accepted = false;
  shard.group->on_switch_path(
      shard.number, [&](collective::SwitchPath& path) { accepted = path.accept(generation, views, engine::now_ns()); });
  return accepted;
}

// The thread on which Python runs signal handlers: in a fork's child, the one that forked.
std::atomic<pthread_t> main_thread;

void hear_signals() {
  main_thread = nb::cast<std::uintptr_t>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  pthread_atfork(nullptr, nullptr, [] { main_thread = pthread_self(); });
  Engine::set_interrupts({
      .run_on_this_thread = [] { return pthread_equal(pthread_self(), main_thread.load()) != 0; },
      .interrupts_wait =
          [] {
            const nb::gil_scoped_acquire gil;
            return PyErr_CheckSignals() != 0;  // the exception stays with this thread until raise_of_handler
          },
  });
}

// After every wait: what a signal's handler raised, if that ended the wait.
void raise_of_handler() {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

bool wait(Group& group, const Operation& operation, std::int64_t timeout_ns) {
  bool done = false;
  {
    nb::gil_scoped_release release;
    done = group.wait(operation, timeout_ns);
  }
  raise_of_handler();
  return done;
}

std::shared_ptr<Operation> submit(Group& group, int kind, int dtype, int reduce, bool average, int root,
                                  const std::vector<Region>& inputs, const std::vector<Region>& outputs,
                                  std::int64_t timeout_ns, bool on_this_thread, int tag) {
  if (kind < 0 || kind >= collective::kKindCount || dtype < 0 || dtype >= kernels::kDTypeCount || reduce < 0 ||
      reduce >= kernels::kReduceOpCount) {
    throw nb::value_error("unknown operation, dtype or reduction");
  }
  collective::Call call;
  call.kind = static_cast<collective::Kind>(kind);
  call.dtype = static_cast<kernels::DType>(dtype);
  call.reduce = static_cast<kernels::ReduceOp>(reduce);
  call.average = average;
  call.root = root;
  call.tag = tag;
  call.inputs = buffers(inputs);
  call.outputs = buffers(outputs);
  const char* site = call_site();
  std::shared_ptr<Operation> operation;
  {
    nb::gil_scoped_release release;
    operation = group.submit(std::move(call), timeout_ns, on_this_thread, site);
  }
  raise_of_handler();
  return operation;
}

// What PEP 3118's format says of elements that can be reduced as they are; nullopt for any other.
std::optional<kernels::DType> dtype_of(const char* format) {
  using kernels::DType;
  if (format == nullptr || format[0] == 0 || format[1] != 0) return std::nullopt;
  switch (format[0]) {
    case 'f':
      return DType::f32;
    case 'd':
      return DType::f64;
    case 'e':
      return DType::f16;
    case 'b':
      return DType::i8;
    case 'h':
      return DType::i16;
    case 'i':
      return DType::i32;
    case 'l':
    case 'q':
      return DType::i64;
    case 'B':
      return DType::u8;
    case 'H':
      return DType::u16;
    case 'I':
      return DType::u32;
    case 'L':
    case 'Q':
      return DType::u64;
  }
  return std::nullopt;
}

// The short way of a blocking all_reduce in place: one call from Python instead of a dozen. None: done. An Operation:
// it failed. NotImplemented: `array` is nothing for this way, and nothing was done.
nb::object all_reduce_here(Group& group, nb::handle array, int reduce, bool average, std::int64_t timeout_ns) {
  if (reduce < 0 || reduce >= kernels::kReduceOpCount) throw nb::value_error("unknown reduction");
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    return nb::borrow(Py_NotImplemented);
  }
  struct Release {
    Py_buffer* view;
    ~Release() { PyBuffer_Release(view); }
  } const release{&view};
  const auto dtype = dtype_of(view.format);
  if (!dtype) return nb::borrow(Py_NotImplemented);
  collective::Call call;
  call.kind = collective::Kind::all_reduce;
  call.dtype = *dtype;
  call.reduce = static_cast<kernels::ReduceOp>(reduce);
  call.average = average;
  call.outputs.push_back({static_cast<std::byte*>(view.buf), static_cast<std::size_t>(view.len)});
  std::shared_ptr<Operation> operation;
  const char* site = call_site();
  {
    nb::gil_scoped_release released;
    operation = group.submit(std::move(call), timeout_ns, true, site);
    group.wait(*operation, -1);  // its own deadline ends it
  }
  raise_of_handler();
  if (operation->failure()) return nb::cast(std::move(operation));
  return nb::none();
}

std::optional<std::tuple<std::uint64_t, int>> as_tuple(const std::optional<Group::Broken>& broken) {
  if (!broken) return std::nullopt;
  return std::tuple(broken->received, broken->reconnects);
}

template <class Enum>
nb::dict names(int count) {
  nb::dict out;
  for (int i = 0; i < count; ++i) out[name(static_cast<Enum>(i))] = i;
  return out;
}

nb::bytes record_bytes(const engine::EventRecord* records, std::size_t count) {
  return nb::bytes(reinterpret_cast<const char*>(records), count * sizeof(engine::EventRecord));
}

}  // namespace

void bind_engine(nb::module_& m) {
  hear_signals();
  nb::module_ e = m.def_submodule("engine");
  e.attr("DTYPES") = names<kernels::DType>(kernels::kDTypeCount);
  e.attr("REDUCE_OPS") = names<kernels::ReduceOp>(kernels::kReduceOpCount);
  e.attr("KINDS") = names<collective::Kind>(collective::kKindCount);
  e.attr("ALGORITHMS") = names<collective::AlgorithmId>(collective::kAlgorithmCount);
  e.attr("SEGMENT_BYTES") = sizeof(transport::ShmNode::Segment);
  e.attr("MAX_NODE_SIZE") = transport::ShmNode::kMaxSize;
  e.attr("ANY_SOURCE") = collective::kAnySource;
  nb::dict supported;
  for (int i = 0; i < collective::kAlgorithmCount; ++i) {
    const auto algorithm = static_cast<collective::AlgorithmId>(i);
    nb::list kinds;
    for (int k = 0; k < collective::kKindCount; ++k) {
      const auto kind = static_cast<collective::Kind>(k);
      if (collective::supports(algorithm, kind)) kinds.append(name(kind));
    }
    supported[name(algorithm)] = nb::tuple(kinds);
  }
  e.attr("SUPPORTS") = supported;  // algorithm -> the operations there is a machine for
  e.attr("EVENT_BYTES") = sizeof(engine::EventRecord);
  nb::list failures;
  for (const char* word : {"none", "peer_lost", "switch_lost", "mismatch", "timeout", "aborted", "system"}) {
    failures.append(word);
  }
  e.attr("FAILURES") = nb::tuple(failures);

  nb::class_<transport::ShmBuffer>(e, "ShmBuffer", "Zeroed memory that other ranks of the node may map.")
      .def(nb::init<std::size_t>(), nb::arg("bytes"))
      .def_prop_ro("address", [](const transport::ShmBuffer& self) { return std::uintptr_t(self.data()); })
      .def_prop_ro("bytes", &transport::ShmBuffer::bytes);
  e.def(
      "share_memory",
      [](std::uintptr_t address, std::size_t bytes, int fd) {
        transport::Fd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
        if (!own) transport::throw_errno("keep a descriptor of shared memory");
        transport::ShmRegistry::instance().add(reinterpret_cast<std::byte*>(address), bytes, std::move(own));
      },
      nb::arg("address"), nb::arg("bytes"), nb::arg("fd"),
      "Memory that is mapped, shared, from the start of `fd`: other ranks may map it until unshare_memory(address).");
  e.def(
      "unshare_memory",
      [](std::uintptr_t address) { transport::ShmRegistry::instance().remove(reinterpret_cast<std::byte*>(address)); },
      nb::arg("address"));

  using transport::PeerMemory;
  nb::class_<PeerMemory>(e, "PeerMemory", "Reads what stands in the other processes of a node, once it has met them.")
      // Never owned by a Python object: the engine thread may be the last to let go of it, and takes no GIL.
      .def(nb::new_([](int size) { return std::make_shared<PeerMemory>(size); }), nb::arg("size"))
      .def_prop_ro("address", [](const PeerMemory& self) { return std::uintptr_t(&self.mark()); })
      .def_prop_ro("bytes_read", &PeerMemory::bytes_read)
      .def_prop_ro("mark", [](const PeerMemory& self) { return nb::bytes(self.mark().data(), self.mark().size()); })
      .def(
          "probe",
          [](PeerMemory& self, int position, int pid, std::uintptr_t address, const nb::bytes& mark) -> std::string {
            PeerMemory::Mark expected{};
            if (mark.size() != expected.size()) throw nb::value_error("that is no mark");
            std::memcpy(expected.data(), mark.data(), expected.size());
            const auto probed = self.probe(position, pid, address, expected);
            if (probed == PeerMemory::ProbeResult::refused) return std::strerror(errno);
            return probed == PeerMemory::ProbeResult::another ? "another process has its number here" : "";
          },
          nb::arg("position"), nb::arg("pid"), nb::arg("address"), nb::arg("mark"),
          "Whether the mark of the rank at `position` can be read: empty, or why not.");

  nb::class_<Operation>(e, "Operation")
      .def("wait", &Operation::wait, nb::arg("timeout_ns"), nb::call_guard<nb::gil_scoped_release>())
      .def("notify", &Operation::notify, "Queue the id when done; False: it is done already.")
      .def_prop_ro("done", &Operation::done)
      .def_prop_ro("id", &Operation::id)
      .def_prop_ro("peer", &Operation::peer, "Of a send or receive that is done: the other rank.")
      .def_prop_ro("failure",
                   [](const Operation& self) -> std::optional<std::tuple<int, int, std::string>> {
                     if (!self.done() || !self.failure()) return std::nullopt;
                     return std::tuple(static_cast<int>(self.failure().kind), self.failure().rank, self.failure().text);
                   })
      .def("record", [](const Operation& self) { return record_bytes(&self.record(), 1); });

  nb::class_<Group>(e, "Group")
      .def(
          "attach",
          [](Group& self, DataPort& port, std::uint64_t generation, std::uint32_t job, std::uint32_t epoch,
             std::uint32_t incarnation, std::uint16_t worker, const std::vector<int>& ranks, std::uint32_t window,
             std::uint32_t payload_bytes, const std::optional<Keys>& keys,
             const std::vector<std::tuple<int, std::uint64_t, int>>& rows, std::uint16_t table_hash, bool encrypts) {
            std::vector<collective::SwitchPath::Row> table;
            for (const auto& [kind, min_bytes, algorithm] : rows) {
              if (kind < 0 || kind >= collective::kKindCount || algorithm < 0 ||
                  algorithm >= collective::kAlgorithmCount) {
                throw nb::value_error("the table names an operation or algorithm that does not exist");
              }
              table.push_back(
                  {static_cast<collective::Kind>(kind), min_bytes, static_cast<collective::AlgorithmId>(algorithm)});
            }
            const protocol::WorkerConfig config{
                job, epoch, incarnation, worker, static_cast<std::uint16_t>(ranks.size()), window, payload_bytes};
            self.attach(make_channel(self, port, generation, config, ranks, keys, encrypts), std::move(table),
                        table_hash);
          },
          nb::arg("port"), nb::kw_only(), nb::arg("generation"), nb::arg("job"), nb::arg("epoch"),
          nb::arg("incarnation"), nb::arg("worker"), nb::arg("ranks"), nb::arg("window"), nb::arg("payload_bytes"),
          nb::arg("keys").none(), nb::arg("rows"), nb::arg("table_hash"), nb::arg("encrypts") = false,
          "keys: of this worker's contributions and of the answers; None without tags. rows: (operation, bytes from "
          "which on, algorithm) for as long as the switch is gone, hashed.")
      .def(
          "set_table",
          [](Group& self, const std::vector<TableRow>& table, std::uint16_t hash) {
            self.set_table(table_of(table), hash);
          },
          nb::arg("table"), nb::arg("table_hash"),
          "Another choice table: every rank says so between the same two operations, none of which is under way.")
      .def(
          "set_shares", [](Group& self, const collective::Shares& shares) { self.set_shares(shares); },
          nb::arg("shares"), "What an all_reduce by split goes by; said as a table is.")
      .def_prop_ro(
          "shares", [](const Group& self) { return self.shares(); },
          "As of the last operation; None where there are none.")
      .def(
          "share",
          [](Group& self, int position, const std::vector<int>& ranks, const std::vector<int>& segments,
             const std::vector<int>& doorbells, const std::vector<int>& links,
             std::shared_ptr<transport::PeerMemory> memory) {
            self.share(std::make_unique<transport::ShmNode>(position, ranks, owned(segments), owned(doorbells),
                                                            owned(links), std::move(memory)));
          },
          nb::arg("position"), nb::arg("ranks"), nb::arg("segments"), nb::arg("doorbells"), nb::arg("links"),
          nb::arg("memory").none(),
          "segments[p], doorbells[p], links[p]: memfd, eventfd and a local socket to the node's position p (-1 at this "
          "rank's). Takes ownership of them. memory: where each rank has met every other, on all ranks alike; or None.")
      .def("submit", &submit, nb::arg("kind"), nb::arg("dtype"), nb::arg("reduce"), nb::arg("average"), nb::arg("root"),
           nb::arg("inputs"), nb::arg("outputs"), nb::arg("timeout_ns"), nb::arg("on_this_thread"), nb::arg("tag") = 0)
      .def("all_reduce_here", &all_reduce_here, nb::arg("array"), nb::arg("reduce"), nb::arg("average"),
           nb::arg("timeout_ns"))
      .def("wait", &wait, nb::arg("operation"), nb::arg("timeout_ns"),
           "Wait for an operation of this group, on whose behalf this thread may be made to drive. On the main thread, "
           "what a signal's handler raises ends the wait and fails the group; the operation is then done.")
      .def("choose",
           [](const Group& self, int kind, int dtype, std::uint64_t bytes) {
             const auto choice = self.choose(static_cast<collective::Kind>(kind), static_cast<kernels::DType>(dtype),
                                             kernels::ReduceOp::sum, bytes);
             return std::tuple(name(choice.algorithm), name(static_cast<kernels::DType>(choice.wire)));
           })
      .def(
          "fail",
          [](Group& self, int kind, int rank, const std::string& text,
             std::tuple<std::uint32_t, std::int64_t> expired) {
            self.fail({.kind = static_cast<collective::Failure::Kind>(kind),
                       .rank = rank,
                       .text = text,
                       .expired = {std::get<0>(expired), std::get<1>(expired)}});
          },
          nb::arg("kind"), nb::arg("rank"), nb::arg("text"), nb::arg("expired") = std::tuple(0, 0),
          nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("failure",
                   [](const Group& self) -> std::optional<std::tuple<int, int, std::string>> {
                     const auto failure = self.failure();
                     if (!failure) return std::nullopt;
                     return std::tuple(static_cast<int>(failure.kind), failure.rank, failure.text);
                   })
      .def(
          "broken",
          [](Group& self, int lane, int peer, int rail) {
            nb::gil_scoped_release release;
            return as_tuple(self.broken(lane, peer, rail));
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("rail"),
          "Of a broken connection: bytes received over it in all, and how often it was mended; None of any other.")
      .def(
          "disconnect",
          [](Group& self, int lane, int peer, int rail, int reconnects) {
            nb::gil_scoped_release release;
            return as_tuple(self.disconnect(lane, peer, rail, reconnects));
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("rail"), nb::arg("reconnects"),
          "As broken(), after giving up one that is up and was mended at most `reconnects` times (-1: however often).")
      .def(
          "reconnect",
          [](Group& self, int lane, int peer, int rail, int reconnects, int fd, std::uint64_t peer_received,
             const PythonSecrets& secrets) {
            transport::Fd socket(fd);
            const auto given = secrets_of(secrets);
            nb::gil_scoped_release release;
            return self.reconnect(lane, peer, rail, reconnects, std::move(socket), peer_received, given);
          },
          nb::arg("lane"), nb::arg("peer"), nb::arg("rail"), nb::arg("reconnects"), nb::arg("fd"),
          nb::arg("peer_received"), nb::arg("secrets").none() = nb::none(),
          "Go on over `fd`, which is taken over, from what the peer has received, if the connection is broken and was "
          "mended `reconnects` times. False: it cannot be gone on with.")
      .def("give_up", &Group::give_up, nb::arg("lane"), nb::arg("peer"), nb::arg("rail"), nb::arg("reconnects"),
           nb::arg("why"), nb::call_guard<nb::gil_scoped_release>(),
           "A connection that is broken, after so many times of mending, will not be made again.")
      .def_prop_ro("collectives_submitted", &Group::collectives_submitted,
                   "The number of collectives that this rank has submitted.")
      .def("recent_call", &Group::recent_call, nb::arg("sequence"),
           "How one of the last calls was made, in words that all ranks share.")
      .def("last_seen", &Group::last_seen, "What this rank does, to be told to others.")
      .def_prop_ro(
          "expired",
          [](const Group& self) {
            const auto expired = self.failure().expired;
            return std::tuple(expired.call, expired.timeout_ns);
          },
          "(number, timeout in ns) of the collective whose deadline, on any rank, ended this group; (0, 0): none.")
      .def(
          "events",
          [](const Group& self, std::uint64_t since) {
            std::uint64_t total = 0;
            std::vector<engine::EventRecord> records;
            {
              nb::gil_scoped_release release;
              records = self.events(since, &total);
            }
            return nb::make_tuple(total, record_bytes(records.data(), records.size()));
          },
          nb::arg("since") = 0,
          "How many there ever were; the newest, oldest first, as far as they came after the first `since`.")
      .def(
          "shard", [](const std::shared_ptr<Group>& self, std::size_t number) { return Shard{self, number}; },
          nb::arg("number"), "The way to one of its switches, by the order of attaching.")
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size);

  nb::class_<Shard>(e, "Shard")
      .def(
          "stand_by",
          [](const Shard& self, DataPort& port, std::uint64_t generation, std::uint32_t job, std::uint32_t epoch,
             std::uint32_t incarnation, std::uint16_t worker, const std::vector<int>& ranks, std::uint32_t window,
             std::uint32_t payload_bytes, const std::optional<Keys>& keys, bool encrypts) {
            const protocol::WorkerConfig config{
                job, epoch, incarnation, worker, static_cast<std::uint16_t>(ranks.size()), window, payload_bytes};
            auto channel = make_channel(*self.group, port, generation, config, ranks, keys, encrypts);
            nb::gil_scoped_release release;
            self.group->on_switch_path(self.number,
                                       [&](collective::SwitchPath& path) { path.stand_by(std::move(channel)); });
          },
          nb::arg("port"), nb::kw_only(), nb::arg("generation"), nb::arg("job"), nb::arg("epoch"),
          nb::arg("incarnation"), nb::arg("worker"), nb::arg("ranks"), nb::arg("window"), nb::arg("payload_bytes"),
          nb::arg("keys").none(), nb::arg("encrypts") = false,
          "A membership to go on by, once the first of `ranks` says so (promise).")
      .def("freeze", &freeze_generation, nb::arg("generation"),
           "Stop a membership. (base, end, held, promised), see collective::SwitchPath::FrozenState; None: there is no "
           "such.")
      .def("kept", &kept_packets, nb::arg("generation"), nb::arg("chunks"),
           "Results as they came; None where one is not kept.")
      .def("accept", &accept_packets, nb::arg("generation"), nb::arg("packets"),
           "Results that another rank kept. False: one was not for this rank.")
      .def(
          "fall_back",
          [](const Shard& self, std::uint64_t generation, std::uint64_t end, bool promised) {
            self.group->on_switch_path(
                self.number, [&](collective::SwitchPath& path) { path.fall_back(generation, end, promised); });
          },
          nb::arg("generation"), nb::arg("end"), nb::arg("promised"), nb::call_guard<nb::gil_scoped_release>(),
          "Go on without it. end: the lowest chunk that some rank had not begun; promised: as the first rank said.")
      .def(
          "promise",
          [](const Shard& self, std::uint64_t generation) {
            bool promised = false;
            self.group->on_switch_path(self.number,
                                       [&](collective::SwitchPath& path) { promised = path.promise(generation); });
            return promised;
          },
          nb::arg("generation"), nb::call_guard<nb::gil_scoped_release>(),
          "At the first rank: the next operation, on all ranks, goes by this membership. False: it cannot.")
      .def("traffic", &traffic_of, "None: not attached.");

  e.def("add_group", &make_group, nb::arg("rank"), nb::arg("fds"), nb::arg("lane_fds"), nb::arg("fallback_fds"),
        nb::arg("resumable"), nb::arg("id"), nb::arg("job"), nb::arg("spin_us"), nb::arg("spins_for_sockets"),
        nb::arg("yields"), nb::arg("table"), nb::arg("table_hash"), nb::arg("nodes"), nb::arg("fabric"),
        nb::arg("secrets") = Secrets{},
        "fds[r]: connected stream sockets to rank r, one a rail, none at this rank's place; lane_fds[r]: others, for "
        "messages between two ranks; fallback_fds[i][r]: for what switch i was to do; resumable[r]: whether one that "
        "breaks may "
        "be made again; fabric[lane][r]: a stream to go over instead, if any are given (spares are lanes from 2 on); "
        "secrets[lane][r]: by rail, what authenticates or encrypts it, if any are given. Takes ownership of them.");
  e.def(
      "remove_group", [](const std::shared_ptr<Group>& group) { Engine::instance().remove_group(group); },
      nb::call_guard<nb::gil_scoped_release>());
  e.def(
      "next_completion", [](std::int64_t timeout_ns) { return Engine::instance().next_completion(timeout_ns); },
      nb::call_guard<nb::gil_scoped_release>());
  e.def("interrupt_completions", [] { Engine::instance().interrupt_completions(); });
  e.def(
      "next_async_event",
      [](std::int64_t timeout_ns)
          -> std::optional<std::tuple<bool, std::uint64_t, std::vector<int>, int, int, std::uint32_t, double>> {
        const auto event = Engine::instance().next_async_event(timeout_ns);
        if (!event) return std::nullopt;
        return std::tuple(event->kind == engine::AsyncEvent::Kind::broken, event->group, event->ranks, event->lane,
                          event->rail, event->sequence, static_cast<double>(event->waited_ns) / 1e9);
      },
      nb::arg("timeout_ns"), nb::call_guard<nb::gil_scoped_release>(),
      "(is a broken connection, else an overdue operation; group id; ranks; lane, rail; sequence, seconds waited)");
  e.def("interrupt_async_events", [] { Engine::instance().interrupt_async_events(); });

  using engine::ComputeSampler;
  nb::class_<ComputeSampler>(e, "ComputeSampler", "Sees how much one thread computes; one at a time in a process.")
      .def(
          nb::init<pthread_t, int>(), nb::arg("thread"), nb::arg("id"),
          "thread: as pthread_self (threading's ident) and as the kernel calls it (native_id); it must not end before.")
      .def("stop", &ComputeSampler::stop, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "take",
          [](ComputeSampler& self) {
            const auto samples = self.take();
            return nb::bytes(reinterpret_cast<const char*>(samples.data()),
                             samples.size() * sizeof(engine::ComputeSample));
          },
          "The lines since the last call (netfold.profile.run.PROGRESS).")
      .def_prop_ro("sees_queue", &ComputeSampler::sees_queue);

  e.def("hide_from_call_sites", &hide_from_call_sites, nb::arg("folder"),
        "Calls made by files below `folder` are reported where those were called from.");
}
