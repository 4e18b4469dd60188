#include <netfold/control/job_tree.hpp>
#include <netfold/control/switch_address.hpp>
#include <netfold/protocol/packet.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "messages.hpp"

namespace netfold::control {
namespace {

using Ids = std::vector<std::uint32_t>;

struct Contributor {
  std::uint32_t worker = 0;              // of a switch: the lowest below it
  std::optional<std::uint32_t> switch_;  // nullopt: it is a worker
  std::uint32_t workers = 1;             // that it contributes for

  Value value() const {
    Value::Array numbers{worker, worker};  // the worker's rank is its number
    if (switch_) numbers.insert(numbers.end(), {Value(*switch_), Value(workers)});
    return numbers;
  }
};

std::string without_fingerprint(const std::string& endpoint) { return endpoint.substr(0, endpoint.find('#')); }

std::string description_of(const PathToRoot& path) {
  std::string text;
  for (const std::string& each : path.endpoints) text += (text.empty() ? "" : " below ") + without_fingerprint(each);
  return path.error.empty() ? text : text + " (" + path.error + ")";
}

[[noreturn]] void refuse_apart(std::span<const PathToRoot> paths) {
  std::map<std::string, std::size_t> first_ranks;
  for (std::size_t rank = 0; rank < paths.size(); ++rank) first_ranks.emplace(description_of(paths[rank]), rank);
  std::string all;
  for (const auto& [description, rank] : first_ranks) {
    all += (all.empty() ? "rank " : "; rank ") + std::to_string(rank) + "'s is " + description;
  }
  throw std::runtime_error("the switches of the ranks have no common parent: " + all +
                           ". Start the lower ones with --parent, or give all ranks the same NETFOLD_SWITCH");
}

// The ids from each worker's switch to the lowest one that all paths contain.
std::vector<Ids> cut_at_common(std::span<const PathToRoot> paths) {
  const auto place_of = [](const Ids& ids, std::uint32_t id) { return std::ranges::find(ids, id); };
  for (const std::uint32_t root : paths[0].ids) {
    std::vector<Ids> cut;
    for (const PathToRoot& path : paths) {
      const auto place = place_of(path.ids, root);
      if (place == path.ids.end()) break;
      cut.emplace_back(path.ids.begin(), place + 1);
    }
    if (cut.size() == paths.size()) return cut;
  }
  refuse_apart(paths);
}

void check_contributors(const PathToRoot& path, std::size_t level, const std::vector<Contributor>& contributors) {
  if (contributors.size() <= protocol::kMaxWorkers) return;
  const bool has_switch = std::ranges::any_of(contributors, [](const auto& each) { return each.switch_.has_value(); });
  throw std::runtime_error(std::to_string(contributors.size()) + (has_switch ? " ranks and switches" : " ranks") +
                           " join the switch at " + without_fingerprint(path.endpoints[level]) +
                           ", and one switch adds for at most " + std::to_string(protocol::kMaxWorkers) +
                           ": start several switches below it (netfold switch --parent), and let NETFOLD_SWITCH of "
                           "each rank name the one of its rack");
}

}  // namespace

PathToRoot::PathToRoot(const Value& message, const std::string& endpoint) : error(text_of(message, "error")) {
  const Value* switches = message.find("switches");
  const auto* all = switches == nullptr ? nullptr : std::get_if<Value::Array>(&switches->data);
  if (all == nullptr || all->empty() || all->size() > kMaxTreeDepth) {
    throw ProtocolError("a path to the root has 1 to " + std::to_string(kMaxTreeDepth) + " switches");
  }
  for (const Value& each : *all) {
    const auto* pair = std::get_if<Value::Array>(&each.data);
    const auto* id = pair == nullptr || pair->size() != 2 ? nullptr : std::get_if<std::uint64_t>(&(*pair)[0].data);
    const auto* address = id == nullptr ? nullptr : std::get_if<std::string>(&(*pair)[1].data);
    if (address == nullptr || *id > std::numeric_limits<std::uint32_t>::max()) {
      throw ProtocolError("a switch of a path is an id and an address");
    }
    ids.push_back(static_cast<std::uint32_t>(*id));
    endpoints.push_back(endpoints.empty() && !endpoint.empty() ? endpoint : *address);
    try {
      SwitchAddress::parse(endpoints.back());
    } catch (const std::invalid_argument&) {
      throw ProtocolError("a path names a switch by no address");
    }
  }
}

Value PathToRoot::message() const {
  Value::Array switches;
  for (std::size_t i = 0; i < ids.size(); ++i) switches.push_back(Value::Array{ids[i], endpoints[i]});
  return Value::Map{{"switches", std::move(switches)}, {"error", error}};
}

std::map<std::uint32_t, Value> trees_of(std::span<const PathToRoot> paths) {
  if (paths.size() > kMaxJobWorkers) {
    throw std::runtime_error("switches add for at most " + std::to_string(kMaxJobWorkers) + " ranks of a job, not " +
                             std::to_string(paths.size()));
  }
  const std::vector<Ids> cut = cut_at_common(paths);
  std::map<std::uint32_t, std::uint32_t> above;
  std::map<std::uint32_t, std::vector<Contributor>> contributors;
  const auto contribution_of = [&](std::uint32_t below, std::uint32_t parent) -> Contributor* {
    const auto found = std::ranges::find(contributors[parent], std::optional(below), &Contributor::switch_);
    return found == contributors[parent].end() ? nullptr : &*found;
  };
  for (std::uint32_t worker = 0; worker < cut.size(); ++worker) {
    const Ids& path = cut[worker];
    contributors[path[0]].push_back({worker, std::nullopt});
    for (std::size_t level = 0; level + 1 < path.size(); ++level) {
      const std::uint32_t below = path[level], parent = path[level + 1];
      if (above.emplace(below, parent).first->second != parent) {
        throw std::runtime_error(
            "a switch has two parents in the paths of the ranks: was a switch started again just now?");
      }
      if (Contributor* known = contribution_of(below, parent)) {
        ++known->workers;
      } else {
        contributors[parent].push_back({worker, below, 1});
      }
    }
  }
  // Each switch has one parent, and all paths end at the same one, so that none is a circle.
  std::map<std::uint32_t, Value> trees;
  for (std::size_t worker = 0; worker < cut.size(); ++worker) {
    if (trees.contains(cut[worker][0])) continue;
    Value::Array levels;
    for (std::size_t level = 0; level < cut[worker].size(); ++level) {
      const std::vector<Contributor>& all = contributors[cut[worker][level]];
      check_contributors(paths[worker], level, all);
      Value::Array values;
      for (const Contributor& each : all) values.push_back(each.value());
      levels.push_back(Value::Array{cut[worker][level], std::move(values)});
    }
    trees.emplace(cut[worker][0], std::move(levels));
  }
  if (above.empty()) trees.clear();
  return trees;
}

}  // namespace netfold::control
