// netfold._native.engine.Shard: a group's path to one of its switches, for recovery.

#include <type_traits>

#include "auth.hpp"
#include "convert.hpp"
#include "engine.hpp"

using namespace netfold;
using collective::SwitchPath;
using engine::Group;

namespace {

// The result of `action` on the switch path, without the GIL; a default value if the group has ended.
template <class Action>
auto on_path(const Shard& shard, const Action& action) {
  const nb::gil_scoped_release released;
  std::invoke_result_t<Action, SwitchPath&> result{};
  shard.group->on_switch_path(shard.number, [&](SwitchPath& path) { result = action(path); });
  return result;
}

nb::object traffic_of(const Shard& shard) {
  const auto all = shard.group->traffic();
  if (shard.number >= all.size()) return nb::none();
  const engine::Traffic& traffic = all[shard.number];
  nb::dict out;
  out["generation"] = traffic.generation;
  out["packets_sent"] = traffic.packets_sent;
  out["retransmissions"] = traffic.retransmissions;
  out["smoothed_rtt_ns"] = traffic.smoothed_rtt_ns;
  out["oldest_outstanding"] = traffic.oldest_outstanding;
  out["idle"] = traffic.idle;
  out["path_error"] = traffic.path_error;
  out["send_error"] = traffic.send_error;
  out["drops"] = drops_of(traffic.drops);
  return out;
}

nb::object freeze(const Shard& shard, std::uint64_t generation) {
  const auto state = on_path(shard, [&](SwitchPath& path) { return path.freeze(generation); });
  if (!state) return nb::none();
  const auto& received = state->channel;
  return nb::make_tuple(received.base, received.end, to_bytes(received.held), state->promised);
}

nb::object kept(const Shard& shard, std::uint64_t generation, const std::vector<std::uint64_t>& chunks) {
  const auto packets = on_path(shard, [&](SwitchPath& path) { return path.kept(generation, chunks); });
  if (!packets) return nb::none();
  nb::list out;
  for (const auto& packet : *packets) out.append(to_bytes(packet));
  return out;
}

bool accept_packets(const Shard& shard, std::uint64_t generation, const std::vector<nb::bytes>& packets) {
  std::vector<std::span<const std::byte>> views;
  for (const nb::bytes& packet : packets) views.push_back(bytes_of(packet));
  return on_path(shard, [&](SwitchPath& path) { return path.accept(generation, views, engine::now_ns()); });
}

void fall_back(const Shard& shard, std::uint64_t generation, std::uint64_t end, bool promised) {
  on_path(shard, [&](SwitchPath& path) { return path.fall_back(generation, end, promised), true; });
}

void stand_by(const Shard& shard, DataPort& port, const nb::kwargs& membership) {
  auto channel = channel_of(*shard.group, port, membership);
  on_path(shard, [&](SwitchPath& path) { return path.stand_by(std::move(channel)), true; });
}

bool promise(const Shard& shard, std::uint64_t generation) {
  return on_path(shard, [&](SwitchPath& path) { return path.promise(generation); });
}

}  // namespace

std::unique_ptr<collective::Channel> channel_of(const Group& group, DataPort& port, const nb::kwargs& membership) {
  const auto ranks = field<std::vector<int>>(membership, "ranks");
  const protocol::WorkerConfig config{
      field<std::uint32_t>(membership, "job"),           field<std::uint32_t>(membership, "epoch"),
      field<std::uint32_t>(membership, "incarnation"),   field<std::uint16_t>(membership, "worker"),
      static_cast<std::uint16_t>(ranks.size()),          field<std::uint32_t>(membership, "window"),
      field<std::uint32_t>(membership, "payload_bytes"),
  };
  std::optional<collective::ChannelKeys> channel_keys;
  if (const auto keys = field<std::optional<std::tuple<nb::bytes, nb::bytes>>>(membership, "keys")) {
    const bool encrypts = membership.contains("encrypts") && field<bool>(membership, "encrypts");
    channel_keys = {key_of(std::get<0>(*keys)), key_of(std::get<1>(*keys)),
                    encrypts ? auth::Security::encrypt : auth::Security::authenticate};
  }
  return std::make_unique<collective::Channel>(field<std::uint64_t>(membership, "generation"), config, channel_keys,
                                               ranks, group.rank(), port.take(), port.to);
}

void bind_switch_path(nb::module_& e) {
  nb::class_<Shard>(e, "Shard", "A group's path to one of its switches.")
      .def("stand_by", &stand_by, "port"_a, "membership"_a,
           "Add a membership that replaces a lost one once the first of its ranks announces it (promise).\n\n"
           "Keywords: generation, job, epoch, incarnation, worker, ranks, window, payload_bytes, encrypts (default "
           "False), and keys: of this worker's contributions and of results; None: packets without MACs.")
      .def("freeze", &freeze, "generation"_a,
           "Stop a membership. (base, end, held, promised), see collective::SwitchPath::FrozenState; None: there is no "
           "such membership.")
      .def("kept", &kept, "generation"_a, "chunks"_a, "The packets with these results; None: one of them is not kept.")
      .def("accept", &accept_packets, "generation"_a, "packets"_a,
           "Take results that another rank kept. False: one of them was not for this rank.")
      .def(
          "fall_back", &fall_back, "generation"_a, "end"_a, "promised"_a,
          "Continue without the membership. end: the lowest chunk that some rank had not begun. promised: as the first "
          "rank reports.")
      .def("promise", &promise, "generation"_a,
           "On the first rank: use this membership from the next operation on, on all ranks. False: it cannot be used.")
      .def("traffic", &traffic_of, "None: not attached.");
}
