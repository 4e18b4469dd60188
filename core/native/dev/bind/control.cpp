// netfold._native_dev.control: the native client of a switch, for tests.
#include <nanobind/stl/unique_ptr.h>
#include <poll.h>
#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/collective/contribution_map.hpp>
#include <netfold/control/membership.hpp>
#include <netfold/control/msgpack.hpp>
#include <netfold/control/switch_watch.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <stdexcept>

#include "convert.hpp"
#include "dev_module.hpp"

namespace control = netfold::control;
namespace collective = netfold::collective;
namespace kernels = netfold::kernels;
namespace auth = netfold::auth;
namespace transport = netfold::transport;
using control::SwitchWatch;
using control::Value;

namespace {

nb::object to_python(const Value& value) {
  const auto list = [](const Value::Array& values) {
    nb::list out;
    for (const Value& each : values) out.append(to_python(each));
    return out;
  };
  const auto dict = [](const Value::Map& values) {
    nb::dict out;
    for (const auto& [key, each] : values) out[nb::cast(key)] = to_python(each);
    return out;
  };
  return std::visit(
      [&](const auto& held) -> nb::object {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, std::monostate>) {
          return nb::none();
        } else if constexpr (std::is_same_v<Held, Value::Bytes>) {
          return to_bytes(held);
        } else if constexpr (std::is_same_v<Held, Value::Array>) {
          return list(held);
        } else if constexpr (std::is_same_v<Held, Value::Map>) {
          return dict(held);
        } else {
          return nb::cast(held);
        }
      },
      value.data);
}

// A rank of a job: its membership and its channel, driven by the calling thread.
class Rank {
 public:
  explicit Rank(const control::JoinRequest& request)
      : membership(control::Membership::join(request)),
        channel(membership->take_channel()),
        ranks_(request.ranks.begin(), request.ranks.end()),
        position_(static_cast<std::size_t>(std::ranges::find(ranks_, request.rank) - ranks_.begin())) {}

  void all_reduce(std::uintptr_t data, std::size_t bytes, int dtype, int reduce, std::uint32_t sequence,
                  std::uint16_t table, std::int64_t timeout_ns) {
    collective::Call call;
    call.kind = collective::Kind::all_reduce;
    call.dtype = call.wire = static_cast<kernels::DType>(dtype);
    call.reduce = static_cast<kernels::ReduceOp>(reduce);
    call.algorithm = collective::AlgorithmId::in_network;
    call.table = table;
    call.sequence = sequence;
    call.outputs = {{reinterpret_cast<std::byte*>(data), bytes}};
    const collective::ContributionMap map(call, collective::Team(ranks_, position_));
    const int token = channel->start(call, map);
    const std::int64_t deadline_ns = transport::now_ns() + timeout_ns;
    collective::WaitSet wait;
    for (;;) {
      const std::int64_t now_ns = transport::now_ns();
      const auto progress = channel->poll(now_ns);
      if (channel->active(token).finished) return channel->release(token);
      if (progress == collective::Progress::failed) throw std::runtime_error(channel->failure().text);
      if (const auto event = membership->poll(now_ns, *channel)) {
        throw std::runtime_error(event->reason + " [rank " + std::to_string(event->rank) + "]");
      }
      if (now_ns >= deadline_ns) throw std::runtime_error("all_reduce: the deadline passed");
      if (progress != collective::Progress::idle) continue;
      wait.clear();
      channel->wait_for(wait);
      ::poll(wait.fds.data(), wait.fds.size(), 1);
    }
  }

  // Polls without an operation until `timeout_ns` passes or the membership ends; the reason, else empty.
  std::string watch(std::int64_t timeout_ns) {
    const std::int64_t deadline_ns = transport::now_ns() + timeout_ns;
    while (transport::now_ns() < deadline_ns) {
      if (const auto event = membership->poll(transport::now_ns(), *channel)) return event->reason;
      ::poll(nullptr, 0, 1);
    }
    return {};
  }

  std::unique_ptr<control::Membership> membership;
  std::unique_ptr<collective::Channel> channel;

 private:
  std::vector<int> ranks_;
  std::size_t position_;
};

auth::Security security_named(const std::string& name) {
  if (name == "none") return auth::Security::none;
  if (name == "authenticate") return auth::Security::authenticate;
  if (name == "encrypt") return auth::Security::encrypt;
  throw nb::value_error("security is none, authenticate or encrypt");
}

control::JoinRequest request_of(const nb::kwargs& fields) {
  control::JoinRequest request;
  request.to = control::SwitchAddress::parse(field<std::string>(fields, "endpoint"));
  request.token = control::read_token(field<std::string>(fields, "token_file"));
  request.job = field<std::string>(fields, "job");
  request.name = "native-test";
  request.rank = field<int>(fields, "rank");
  request.ranks = field<std::vector<int>>(fields, "ranks");
  request.window_bytes = field<std::size_t>(fields, "window_bytes");
  request.security = security_named(field<std::string>(fields, "security"));
  request.timeout_ns = static_cast<std::int64_t>(field<double>(fields, "timeout_s") * 1e9);
  request.tree = control::decode(bytes_of(field<nb::bytes>(fields, "tree")));
  return request;
}

std::unique_ptr<Rank> join(const nb::kwargs& fields) {
  const control::JoinRequest request = request_of(fields);
  return without_gil([&] { return std::make_unique<Rank>(request); });
}

// A PathToRoot as message() has it.
nb::object query_path_to_root(const nb::kwargs& fields) {
  const control::JoinRequest request = request_of(fields);
  return to_python(without_gil([&] { return control::query_path_to_root(request); }).message());
}

// paths: encoded messages of PathToRoot. By the joined switch's id.
nb::dict trees_of(const std::vector<nb::bytes>& paths) {
  std::vector<control::PathToRoot> all;
  for (const nb::bytes& each : paths) all.emplace_back(control::decode(bytes_of(each)));
  nb::dict trees;
  for (const auto& [joined, tree] : control::trees_of(all)) trees[nb::cast(joined)] = to_python(tree);
  return trees;
}

}  // namespace

void bind_control(nb::module_& m) {
  nb::module_ c = m.def_submodule("control");
  c.attr("VERSION") = control::kControlProtocolVersion;
  c.def("recode", [](const nb::bytes& bytes) {
    const Value value = control::decode(bytes_of(bytes));
    return nb::make_tuple(to_python(value), to_bytes(control::encode(value)));
  });
  c.def("parse_address", [](const std::string& text) {
    const auto address = control::SwitchAddress::parse(text);
    return nb::make_tuple(address.host, address.port, address.fingerprint);
  });
  c.def("read_token", &control::read_token);
  c.def("join", &join);
  c.def("query_path_to_root", &query_path_to_root);
  c.def("trees_of", &trees_of, "paths"_a);
  nb::class_<Rank>(c, "Rank")
      .def("all_reduce", &Rank::all_reduce, "data"_a, "bytes"_a, "dtype"_a, "reduce"_a, "sequence"_a, "table"_a,
           "timeout_ns"_a, Release())
      .def("watch", &Rank::watch, "timeout_ns"_a, Release())
      .def(
          "leave", [](Rank& self, const std::string& reason, int fault) { self.membership->leave(reason, fault); },
          "reason"_a, "fault"_a = -1, Release())
      .def_prop_ro("payload_bytes", [](const Rank& self) { return self.membership->payload_bytes(); })
      .def_prop_ro("window", [](const Rank& self) { return self.membership->window(); })
      .def_prop_ro("authenticated", [](const Rank& self) { return self.membership->authenticated(); })
      .def_prop_ro("encrypts", [](const Rank& self) { return self.membership->encrypts(); })
      .def_prop_ro("hardware", [](const Rank& self) { return self.membership->hardware(); });
  nb::class_<SwitchWatch>(c, "SwitchWatch")
      .def(nb::init<int, std::int64_t>(), "rank"_a, "now_ns"_a)
      .def(
          "poll",
          [](SwitchWatch& self, std::int64_t now_ns, std::optional<std::uint64_t> chunk, bool urgent) -> nb::object {
            const auto action = self.poll(now_ns, chunk, urgent);
            if (const auto* query = std::get_if<SwitchWatch::Query>(&action)) {
              return nb::make_tuple("query", nb::cast(query->chunk));
            }
            if (const auto* lost = std::get_if<SwitchWatch::Lost>(&action)) return nb::make_tuple("lost", lost->why);
            return nb::none();
          },
          "now_ns"_a, "chunk"_a.none(), "urgent"_a)
      .def("answer", &SwitchWatch::answer, "missing"_a.none())
      .def_prop_ro("stragglers", [](const SwitchWatch& self) { return self.stragglers(); });
}
