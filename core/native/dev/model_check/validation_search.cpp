#include <netfold/model_check/search.hpp>
#include <netfold/protocol/address_validation.hpp>

#include <algorithm>
#include <chrono>
#include <map>
#include <stdexcept>

namespace netfold::model_check {
namespace {

using protocol::Drop;
using AddressValidation = protocol::AddressValidation<int>;

constexpr std::uint32_t kJob = 7;
constexpr std::uint32_t kIncarnation = 2;
constexpr std::uint64_t kFirstNonce = 100;  // worker w's nonce is 100 + w
constexpr int kUnknownPeer = 0;
const std::string kOwn = "its own";

int address_of(int worker) { return 1 + worker; }

struct Hello {
  std::string words;
  int worker;  // that the hello names
  int source;
  std::uint64_t nonce;
  std::uint32_t job = kJob;
  std::uint32_t incarnation = kIncarnation;
};

std::vector<Hello> hellos_of(int workers) {
  std::vector<Hello> hellos;
  for (int worker = 0; worker < workers; ++worker) {
    const std::string name = "worker " + std::to_string(worker);
    const std::uint64_t nonce = kFirstNonce + static_cast<std::uint64_t>(worker);
    hellos.push_back({kOwn, worker, address_of(worker), nonce});
    hellos.push_back({name + "'s, repeated by an eavesdropper", worker, kUnknownPeer, nonce});
    hellos.push_back({name + "'s in a former incarnation", worker, address_of(worker), nonce, kJob, 1});
    hellos.push_back({name + "'s of another job", worker, address_of(worker), nonce, kJob + 1});
    hellos.push_back({"an outsider as " + name, worker, kUnknownPeer, 0});
    hellos.push_back({"an outsider as " + name + ", with a forged address", worker, address_of(worker), 0});
    for (int other = 0; other < workers; ++other) {
      if (other != worker)
        hellos.push_back({name + " as worker " + std::to_string(other), other, address_of(worker), nonce});
    }
  }
  return hellos;
}

struct State {
  std::vector<int> addresses;  // -1: none
  auto operator<=>(const State&) const = default;
};

// Returns the state after the hello, and the reason to drop it. Without MACs, which would only exclude hellos.
std::pair<State, Drop> apply(const State& state, const Hello& hello) {
  const auto at = static_cast<std::size_t>(hello.worker);
  AddressValidation validation{.nonce = kFirstNonce + at, .expected = address_of(hello.worker), .address = {}};
  if (state.addresses[at] >= 0) validation.address = state.addresses[at];
  const protocol::Header header{.flags = protocol::kHello,
                                .job = hello.job,
                                .incarnation = hello.incarnation,
                                .packet_number = hello.nonce,
                                .worker = static_cast<std::uint16_t>(hello.worker)};
  const Drop drop = validation.handle_hello(header, kJob, kIncarnation, hello.source, [] { return true; });
  State next = state;
  next.addresses[at] = validation.address.value_or(-1);
  return {next, drop};
}

std::string broken_by(const State& state, const Hello& hello, const State& next, Drop drop) {
  if (hello.words == kOwn) {
    const bool has_address = next.addresses[static_cast<std::size_t>(hello.worker)] == address_of(hello.worker);
    return has_address && drop == Drop::none ? "" : "a worker's own hello gives it no address";
  }
  return next == state && drop != Drop::none ? "" : "a hello is accepted that is not its worker's own";
}

}  // namespace

Report search_validation(std::uint16_t workers) {
  if (workers == 0 || workers > kMaxWorkers) {
    throw std::invalid_argument("a scope has 1 to " + std::to_string(kMaxWorkers) + " workers");
  }
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Hello> hellos = hellos_of(workers);
  Report report;
  std::map<State, std::vector<std::string>> paths;  // to each state found
  std::vector<State> found{State{std::vector<int>(workers, -1)}};
  paths[found[0]] = {};
  const auto add = [&](const State& from, const State& next, const std::string& event) {
    std::vector<std::string> path = paths[from];
    path.push_back(event);
    const auto depth = static_cast<std::uint32_t>(path.size());
    if (!paths.try_emplace(next, std::move(path)).second) return;
    found.push_back(next);
    report.depth = std::max(report.depth, depth);
  };
  for (std::size_t at = 0; at < found.size() && report.broken.empty(); ++at) {
    const State state = found[at];
    for (const Hello& hello : hellos) {
      ++report.transitions;
      const auto [next, drop] = apply(state, hello);
      report.broken = broken_by(state, hello, next, drop);
      if (!report.broken.empty()) {
        report.trace = paths[state];
        report.trace.push_back(hello.words);
        break;
      }
      if (next != state) add(state, next, hello.words);
    }
  }
  report.states = report.machines = found.size();
  report.packets = hellos.size();
  report.exhausted = report.broken.empty();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace netfold::model_check
