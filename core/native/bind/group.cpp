// netfold._native.engine.Group: groups of ranks, and the calls on them. Every wait releases the GIL.
#include <nanobind/stl/array.h>
#include <netfold/transport/tcp/tcp_pipe.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <string_view>

#include "auth.hpp"
#include "convert.hpp"
#include "engine.hpp"
#include "owners.hpp"
#include "transport.hpp"

using namespace netfold;
using engine::Engine;
using engine::Group;
using engine::Operation;
using kernels::DType;
using transport::fabric::FabricLane;
using transport::fabric::StreamMux;

namespace {

// (address, bytes).
using Region = std::tuple<std::uintptr_t, std::size_t>;

std::vector<collective::Buffer> buffers(const std::vector<Region>& regions) {
  std::vector<collective::Buffer> out;
  out.reserve(regions.size());
  for (const auto& [address, bytes] : regions) out.push_back({reinterpret_cast<std::byte*>(address), bytes});
  return out;
}

// The connections that a group begins with: lane, peer, rail, socket, secrets.
using Connections = std::vector<std::tuple<int, int, int, int, PythonSecrets>>;

// What the meshes of a group have in common.
struct MeshOptions {
  std::uint64_t group = 0;
  int rank = 0;
  std::size_t rails = 1;
  auth::Security security = auth::Security::none;
  std::vector<bool> resumable;  // by rank

  // The pipe to a rank, with no connection yet.
  std::vector<transport::Fd> no_sockets() const { return std::vector<transport::Fd>(rails); }
  std::vector<auth::StreamSecrets> no_secrets() const { return {rails, {.security = security}}; }
  std::unique_ptr<transport::Pipe> pipe(int lane, int peer, std::vector<transport::Fd> sockets,
                                        const std::vector<auth::StreamSecrets>& secrets) const {
    const auto on_broken = [id = group, lane, peer](int rail, bool is_first) {
      using Kind = engine::AsyncEvent::Kind;
      const Kind kind = is_first ? Kind::unused : Kind::broken;
      Engine::instance().async_events.push({.kind = kind, .group = id, .ranks = {peer}, .lane = lane, .rail = rail});
    };
    return std::make_unique<transport::TcpPipe>(std::move(sockets), secrets, resumable[static_cast<std::size_t>(peer)],
                                                on_broken);
  }
};

// Makes the pipes of one mesh over TCP.
class TcpPipeMaker final : public transport::PipeMaker {
 public:
  TcpPipeMaker(std::shared_ptr<const MeshOptions> options, int lane) : options_(std::move(options)), lane_(lane) {}

  std::unique_ptr<transport::Pipe> make(int peer) override {
    return options_->pipe(lane_, peer, options_->no_sockets(), options_->no_secrets());
  }
  // A socket may take part of a record; `flush` writes the rest.
  bool needs_progress() const override { return options_->security != auth::Security::none; }

 private:
  std::shared_ptr<const MeshOptions> options_;
  int lane_;
};

// fabric: carries the bytes instead of the connections. mux: null where there is none.
std::unique_ptr<transport::Mesh> make_mesh(const std::shared_ptr<const MeshOptions>& options, int lane,
                                           const Connections& connections, const FabricLane& fabric) {
  struct Made {
    std::vector<transport::Fd> sockets;
    std::vector<auth::StreamSecrets> secrets;
  };
  std::map<int, Made> made;  // by peer
  for (const auto& [of_lane, peer, rail, socket, secrets] : connections) {
    if (of_lane != lane) continue;
    Made& to = made.try_emplace(peer, Made{options->no_sockets(), options->no_secrets()}).first->second;
    const auto number = static_cast<std::size_t>(rail);
    to.sockets.at(number) = transport::Fd(socket);
    to.secrets.at(number) = secrets_of(secrets);
    if (to.secrets[number].security != options->security) {
      throw nb::value_error("a connection has other secrets than the group");
    }
  }
  const std::size_t size = options->resumable.size();
  std::vector<std::unique_ptr<transport::Pipe>> pipes(size);
  for (auto& [peer, to] : made) {
    pipes.at(static_cast<std::size_t>(peer)) = options->pipe(lane, peer, std::move(to.sockets), to.secrets);
  }
  std::unique_ptr<transport::PipeMaker> maker = std::make_unique<TcpPipeMaker>(options, lane);
  if (fabric.mux != nullptr) {
    auto over_fabric = std::make_unique<transport::fabric::FabricPipeMaker>(fabric, std::move(maker));
    for (const auto& [peer, to] : made) {
      auto& pipe = pipes[static_cast<std::size_t>(peer)];
      pipe = over_fabric->over(peer, std::move(pipe));
    }
    maker = std::move(over_fabric);
  }
  return std::make_unique<transport::Mesh>(options->rank, std::move(pipes), std::move(maker));
}

// (operation, min_bytes, algorithm, wire format, algorithm between hosts), see collective::Choice.
using TableRow = std::tuple<int, std::uint64_t, int, int, int>;

std::vector<collective::Choice> table_of(const std::vector<TableRow>& rows) {
  std::vector<collective::Choice> table;
  for (const auto& [kind, min_bytes, algorithm, wire, between] : rows) {
    if (wire >= 0) checked<DType>(wire, kernels::kDTypeCount, "wire format");
    table.push_back({kind_of(kind), min_bytes, algorithm_of(algorithm), wire, algorithm_of(between)});
  }
  return table;
}

std::shared_ptr<Group> make_group(int rank, std::vector<int> nodes, int lanes, std::size_t rails,
                                  const Connections& connections, bool resumable, std::uint64_t id, std::string job,
                                  int spin_us, bool spins_for_sockets, bool yields, const std::vector<TableRow>& table,
                                  std::uint16_t table_hash, std::shared_ptr<StreamMux> fabric,
                                  std::size_t rma_min_bytes, const std::string& security) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= nodes.size()) {
    throw nb::value_error("rank is not one of the group's");
  }
  if (lanes < 2) throw nb::value_error("a group has a lane for collectives and one for transfers");
  auto of_meshes = std::make_shared<MeshOptions>(
      MeshOptions{.group = id, .rank = rank, .rails = rails, .security = security_of(security), .resumable = {}});
  // A connection inside a host breaks only where a process dies.
  for (const int node : nodes)
    of_meshes->resumable.push_back(resumable && node != nodes[static_cast<std::size_t>(rank)]);
  Group::Options options{.id = id,
                         .job = std::move(job),
                         .spin_us = spin_us,
                         .spins_for_sockets = spins_for_sockets,
                         .yields = yields,
                         .table = table_of(table),
                         .table_hash = table_hash,
                         .nodes = std::move(nodes)};
  const auto doorbell = fabric == nullptr ? nullptr : std::make_shared<transport::fabric::Doorbell>();
  const auto lane = [&](int number) {
    return make_mesh(of_meshes, number, connections, {fabric, doorbell, rma_min_bytes});
  };
  auto mesh = lane(0);
  auto transfers = lane(1);
  std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes;
  for (int number = 2; number < lanes; ++number) fallback_meshes.push_back(lane(number));
  nb::gil_scoped_release release;
  return Engine::instance().add_group(std::move(options), std::move(mesh), std::move(transfers),
                                      std::move(fallback_meshes));
}

void attach(Group& self, DataPort& port, const std::vector<TableRow>& table, std::uint16_t table_hash, bool hardware,
            const nb::kwargs& membership) {
  self.attach(channel_of(self, port, membership), table_of(table), table_hash, hardware);
}

bool wait(Group& group, const Operation& operation, std::int64_t timeout_ns) {
  const DropReleasedOwners at_end;
  const bool done = without_gil([&] { return group.wait(operation, timeout_ns); });
  raise_pending();
  return done;
}

// A rank or tag from Python. Throws nb::type_error or nb::value_error with a sentence for no integer, or one beyond 32 bits.
int checked_int(nb::handle value, const char* what) {
  const auto number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    const std::string text = std::string("a ") + what + " is an integer, not " + nb::cast<std::string>(nb::str(value));
    throw nb::type_error(text.c_str());
  }
  int overflow = 0;
  const long long found = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow == 0 && found >= INT32_MIN && found <= INT32_MAX) return static_cast<int>(found);
  const std::string text = std::string(what) + " " + nb::cast<std::string>(nb::str(number)) +
                           " is out of range; the largest is " + std::to_string(INT32_MAX);
  throw nb::value_error(text.c_str());
}

std::shared_ptr<Operation> submit(Group& group, int kind, int element, int reduce, bool average, nb::handle root,
                                  const std::vector<Region>& inputs, const std::vector<Region>& outputs,
                                  nb::handle owner, std::int64_t timeout_ns, bool on_this_thread, nb::handle tag,
                                  std::uint64_t coalesced) {
  collective::Call call;
  call.kind = kind_of(kind);
  set_element(call, element);
  call.reduce = checked<kernels::ReduceOp>(reduce, kernels::kReduceOpCount, "reduction");
  call.average = average ? collective::Averaging::whole : collective::Averaging::none;
  call.root = checked_int(root, "rank");
  call.tag = checked_int(tag, "tag");
  if (coalesced != 0) call.layout = coalesced | collective::kCoalesced;
  call.inputs = buffers(inputs);
  call.outputs = buffers(outputs);
  const char* site = call_site();
  const DropReleasedOwners at_end;
  auto kept = owner_of(owner);
  auto operation =
      without_gil([&] { return group.submit(std::move(call), timeout_ns, on_this_thread, site, std::move(kept)); });
  raise_pending();
  return operation;
}

std::shared_ptr<Operation> submit_message(Group& group, int peer, int tag, const Region& region, nb::handle owner,
                                          bool sends) {
  collective::Call call;
  call.kind = sends ? collective::Kind::send : collective::Kind::receive;
  call.root = peer;
  call.tag = tag;
  call.is_internal = true;
  (sends ? call.inputs : call.outputs) = buffers({region});
  const DropReleasedOwners at_end;
  auto kept = owner_of(owner);
  return without_gil([&] { return group.submit(std::move(call), -1, false, nullptr, std::move(kept)); });
}

// The dtype of a PEP 3118 format; nullopt: elements that cannot be reduced as they are.
std::optional<DType> dtype_of(const char* format) {
  static constexpr std::string_view kFormats = "fdebhilqBHILQ";
  static constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::f16, DType::i8, DType::i16,
                                      DType::i32, DType::i64, DType::i64, DType::u8, DType::u16,
                                      DType::u32, DType::u64, DType::u64};
  if (format == nullptr || format[0] == 0 || format[1] != 0) return std::nullopt;
  const auto at = kFormats.find(format[0]);
  if (at == std::string_view::npos) return std::nullopt;
  return kDTypes[at];
}

nb::object all_reduce_here(Group& group, nb::handle array, int reduce, bool average, std::int64_t timeout_ns) {
  collective::Call call;
  call.kind = collective::Kind::all_reduce;
  call.reduce = checked<kernels::ReduceOp>(reduce, kernels::kReduceOpCount, "reduction");
  call.average = average ? collective::Averaging::whole : collective::Averaging::none;
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    return nb::borrow(Py_NotImplemented);
  }
  const auto dtype = dtype_of(view.format);
  call.outputs.push_back({static_cast<std::byte*>(view.buf), static_cast<std::size_t>(view.len)});
  const DropReleasedOwners at_end;
  auto owner = owner_of(view);
  if (!dtype) return nb::borrow(Py_NotImplemented);
  call.dtype = *dtype;
  const char* site = call_site();
  auto operation = without_gil([&] {
    auto submitted = group.submit(std::move(call), timeout_ns, true, site, std::move(owner));
    group.wait(*submitted, -1);  // its own deadline ends the wait
    return submitted;
  });
  raise_pending();
  if (operation->failure()) return nb::cast(std::move(operation));
  return nb::none();
}

std::optional<std::tuple<std::uint64_t, int>> tuple_of(const std::optional<Group::Broken>& broken) {
  if (!broken) return std::nullopt;
  return std::tuple(broken->received, broken->reconnects);
}

bool reconnect(Group& self, int lane, int peer, int rail, int reconnects, int fd, std::uint64_t peer_received,
               const PythonSecrets& secrets) {
  transport::Fd socket(fd);
  const auto stream_secrets = secrets_of(secrets);
  nb::gil_scoped_release release;
  return self.reconnect(lane, peer, rail, reconnects, std::move(socket), peer_received, stream_secrets);
}

void connect_unused(Group& self, int lane, int peer, int rail, int fd, const PythonSecrets& secrets) {
  transport::Fd socket(fd);
  const auto stream_secrets = secrets_of(secrets);
  nb::gil_scoped_release release;
  self.connect(lane, peer, rail, std::move(socket), stream_secrets);
}

}  // namespace

void bind_group(nb::module_& e) {
  nb::class_<Group>(e, "Group")
      .def("attach", &attach, "port"_a, nb::kw_only(), "table"_a, "table_hash"_a, "hardware"_a, "membership"_a,
           "Attach a switch by a membership, whose keywords are those of Shard.stand_by.\n\n"
           "table: the choice table while the switch is lost, as of set_table. table_hash: its hash.\n"
           "hardware: the switch has the hardware profile.")
      .def(
          "set_table",
          [](Group& self, const std::vector<TableRow>& table, std::uint16_t hash) {
            self.set_table(table_of(table), hash);
          },
          "table"_a, "table_hash"_a,
          "Replace the choice table. Every rank does so between the same two operations; none may be under way.")
      .def("set_shares", &Group::set_shares, "shares"_a,
           "Set the shares of an all_reduce by `split`, as a table is set.")
      .def_prop_ro("shares", &Group::shares, "As of the last operation; None: none were set.")
      .def(
          "share",
          [](Group& self, int position, const std::vector<int>& ranks, int memory, int socket, std::string name,
             const nb::bytes& token, std::shared_ptr<transport::PeerMemory> peer_memory) {
            transport::Fd memory_fd(memory);
            transport::Fd socket_fd(socket);
            transport::ShmFdExchange::Token own_token{};
            if (token.size() != own_token.size()) throw nb::value_error("the token has the wrong length");
            std::memcpy(own_token.data(), token.data(), own_token.size());
            self.share(std::make_unique<transport::ShmNode>(position, ranks, std::move(memory_fd), std::move(socket_fd),
                                                            std::move(name), own_token, std::move(peer_memory)));
          },
          "position"_a, "ranks"_a, "memory"_a, "socket"_a, "name"_a, "token"_a, "peer_memory"_a.none(),
          "Share memory with the ranks of the node.\n\n"
          "memory: a memfd of node_bytes(len(ranks)), the same on all ranks; the group owns it.\n"
          "socket: a datagram socket bound to the abstract address `name` + rank; the group owns it.\n"
          "token: 16 bytes that only the ranks of the node know.\n"
          "peer_memory: with probes of all other ranks, on all ranks alike; or None.")
      .def(
          "submit", &submit, "kind"_a, "element"_a, "reduce"_a, "average"_a, "root"_a, "inputs"_a, "outputs"_a,
          "owner"_a.none(), "timeout_ns"_a, "on_this_thread"_a, "tag"_a = 0, "coalesced"_a = 0,
          "owner: an object that keeps the memory of inputs and outputs allocated. The operation refers to it until it "
          "is done, whatever becomes of the caller. None: the memory is never freed.\n"
          "coalesced: of several calls in one, a digest of their sizes, which the ranks compare; else 0.")
      .def("submit_message", &submit_message, "peer"_a, "tag"_a, "region"_a, "owner"_a.none(), "sends"_a,
           "Send or receive bytes for netfold itself: no deadline, no record, and any tag, negative ones apart from "
           "those "
           "of the program.")
      .def("withdraw", &Group::withdraw, "receive"_a, Release(),
           "Take back a receive of `submit_message`. False: its message has begun to arrive, or it is done.")
      .def("all_reduce_here", &all_reduce_here, "array"_a, "reduce"_a, "average"_a, "timeout_ns"_a,
           "A blocking all_reduce in place, in one call from Python instead of a dozen. None: done. An Operation: it "
           "failed. NotImplemented: `array` does not fit, and nothing was done.")
      .def("wait", &wait, "operation"_a, "timeout_ns"_a,
           "Wait for an operation of this group; this thread may have to drive. On the main thread the exception of a "
           "signal handler ends the wait and fails the group; the operation is then done.")
      .def("choose",
           [](const Group& self, int kind, int dtype, std::uint64_t bytes) {
             const auto choice = self.choose(static_cast<collective::Kind>(kind), static_cast<DType>(dtype),
                                             kernels::ReduceOp::sum, bytes);
             return std::tuple(name(choice.algorithm), name(static_cast<DType>(choice.wire)));
           })
      .def(
          "fail",
          [](Group& self, int kind, int rank, const std::string& text, std::tuple<std::uint32_t, std::int64_t> expired,
             bool orderly) {
            self.fail({.kind = static_cast<collective::Failure::Kind>(kind),
                       .rank = rank,
                       .text = text,
                       .orderly = orderly,
                       .expired = {std::get<0>(expired), std::get<1>(expired)}});
          },
          "kind"_a, "rank"_a, "text"_a, "expired"_a = std::tuple(0, 0), "orderly"_a = false, Release(),
          "orderly: the rank leaves as at the end of a group, and what it has sent still arrives.")
      .def("drain", &Group::drain, Release(),
           "Wait until other ranks have all that they need of this rank's calls, 2 s at most.")
      .def("serve_connections", &Group::serve_connections, Release(),
           "Handle what comes over the connections from now on, also while no operation is under way.")
      .def_prop_ro(
          "failure", [](const Group& self) { return tuple_of(self.failure()); },
          "(kind, rank at fault, text); None: the group has not failed.")
      .def(
          "broken", [](Group& self, int lane, int peer, int rail) { return tuple_of(self.broken(lane, peer, rail)); },
          "lane"_a, "peer"_a, "rail"_a, Release(),
          "(bytes received, number of reconnects; -1: it was never connected) of a broken connection; None: it is not "
          "broken.")
      .def(
          "disconnect",
          [](Group& self, int lane, int peer, int rail, int reconnects) {
            return tuple_of(self.disconnect(lane, peer, rail, reconnects));
          },
          "lane"_a, "peer"_a, "rail"_a, "reconnects"_a, Release(),
          "As broken(), after disconnecting a connection that was reconnected at most `reconnects` times (-2: any).")
      .def("set_released", &Group::set_released, "lane"_a, "peer"_a, "rail"_a, "is_released"_a, Release(),
           "Both ends are about to disconnect a connection since it is idle: its end is no break. False: they are not.")
      .def("reconnect", &reconnect, "lane"_a, "peer"_a, "rail"_a, "reconnects"_a, "fd"_a, "peer_received"_a,
           "secrets"_a.none() = nb::none(),
           "Continue a broken connection that was reconnected `reconnects` times over `fd`, from the bytes that the "
           "peer "
           "has received; the group owns `fd`. False: the connection cannot be continued.")
      .def(
          "idle_connections",
          [](Group& self) {
            const auto idle = without_gil([&] { return self.idle_connections(); });
            std::vector<std::tuple<double, int, int, int>> found;
            for (const auto& each : idle) {
              found.emplace_back(static_cast<double>(each.since_ns) / 1e9, each.lane, each.peer, each.rail);
            }
            return found;
          },
          "(moment of the last byte, lane, peer, rail) of connections that may be closed until they are used again, "
          "the "
          "longest idle first; by the clock of time.monotonic.")
      .def("silent_connections", &Group::silent_connections, Release(),
           "[lane, peer, rail] of connections whose peer's host confirms nothing any more that this end has sent.")
      .def("connect", &connect_unused, "lane"_a, "peer"_a, "rail"_a, "fd"_a, "secrets"_a.none() = nb::none(),
           "Give a connection that was never made its socket, which the group owns. Does not wait for the driver.")
      .def(
          "give_up", &Group::give_up, "lane"_a, "peer"_a, "rail"_a, "reconnects"_a, "why"_a, "is_orderly"_a = false,
          Release(),
          "Declare a broken connection that was reconnected `reconnects` times lost. is_orderly: the other rank closed "
          "the group.")
      .def_prop_ro("collectives_submitted", &Group::collectives_submitted,
                   "The number of collectives that this rank has submitted.")
      .def("recent_call", &Group::recent_call, "sequence"_a,
           "How one of the last calls was made, in the same text on all ranks; None: no longer known.")
      .def("last_seen", &Group::last_seen, "What this rank does, for other ranks: a sentence without its subject.")
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
            const auto records = without_gil([&] { return self.events(since, &total); });
            return nb::make_tuple(total, to_bytes(std::as_bytes(std::span(records))));
          },
          "since"_a = 0, "(number of records ever made, the newest of them after the first `since`, oldest first).")
      .def(
          "shard", [](const std::shared_ptr<Group>& self, std::size_t number) { return Shard{self, number}; },
          "number"_a, "The path to one of the group's switches, by the order of attaching.")
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size);

  e.def(
      "add_group", &make_group, "rank"_a, "nodes"_a, "lanes"_a, "rails"_a, "connections"_a, "resumable"_a, "id"_a,
      "job"_a, "spin_us"_a, "spins_for_sockets"_a, "yields"_a, "table"_a, "table_hash"_a, "fabric"_a.none(),
      "rma_min_bytes"_a, "security"_a = "none",
      "Create a group. Connections that it does not begin with are made once they are used.\n\n"
      "nodes[r]: the host of rank r, by a number.\n"
      "lanes: 0 for collectives, 1 for transfers, from 2 on one for each switch, for use while it is lost.\n"
      "connections: (lane, rank, rail, socket, secrets) of connected stream sockets, which the group owns; secrets: to "
      "authenticate or encrypt as `security` says, or None.\n"
      "resumable: whether broken connections to other hosts may be reconnected.\n"
      "fabric: the StreamMux whose streams carry the bytes instead, or None.\n"
      "rma_min_bytes: the smallest chunk that is written to the peer's memory over the fabric, the same on all ranks; "
      "0: none is.");
  e.def("remove_group", [](const std::shared_ptr<Group>& group) { Engine::instance().remove_group(group); }, Release());
}
