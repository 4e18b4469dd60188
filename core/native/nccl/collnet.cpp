#include "collnet.hpp"

#include <netfold/collective/registry.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "measure.hpp"

namespace netfold::nccl {
namespace {

using collective::Buffer;
using collective::Call;
using collective::Kind;
using control::Membership;
using engine::Engine;
using kernels::DType;
using kernels::ReduceOp;
using transport::now_ns;

// For all ranks to be connected, which call at once.
constexpr std::int64_t kConnectNs = 30'000'000'000;
constexpr std::int64_t kJoinNs = 10'000'000'000;
// For the slowest rank to say that it has joined.
constexpr std::int64_t kAgreeNs = 2 * kJoinNs;
// The name of host_choices() in messages; choose_paths() has names of its own.
constexpr std::uint16_t kTableWithoutSwitch = 3;

std::string hexadecimal(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte each : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += {kDigits[std::to_integer<int>(each) >> 4], kDigits[std::to_integer<int>(each) & 15]};
  }
  return text;
}

// The reason of an exception; empty: there was none.
template <class Work>
std::string problem_of(Work work) {
  try {
    work();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Rank 0 sends it to all: the job at the switch, and its NETFOLD_ALGORITHM, which must be one for all ranks.
struct Proposal {
  Id job{};
  std::array<char, 256> algorithm{};
};

struct Joined {
  std::unique_ptr<Membership> membership;
  std::unique_ptr<collective::Channel> channel;
  std::string endpoint;
  Algorithms algorithms;
};

// The tree of this rank's join, from all ranks' paths. Rank 0 makes the trees of all.
template <class Agree>
control::Value agreed_tree(RankConnections& connections, const control::PathToRoot& own, const Agree& agree) {
  using Bytes = std::vector<std::byte>;
  const std::vector<Bytes> gathered = connections.gather(encode(own.message()), now_ns() + kAgreeNs);
  std::map<std::uint32_t, Bytes> trees;  // by the joined switch
  const Bytes none = encode(control::Value());
  std::vector<std::span<const std::byte>> of_ranks;
  agree([&] {
    std::vector<control::PathToRoot> paths;
    for (const Bytes& each : gathered) paths.emplace_back(control::decode(each));
    if (paths.empty()) return;
    for (const auto& [joined, tree] : control::trees_of(paths)) trees[joined] = encode(tree);
    for (const control::PathToRoot& each : paths) of_ranks.push_back(trees.empty() ? none : trees.at(each.ids[0]));
  });
  return control::decode(connections.scatter(of_ranks, now_ns() + kAgreeNs));
}

// Joins the switches, on all ranks or on none. Ranks below different switches make a tree of them.
Joined join(RankConnections& connections) {
  const Settings& settings = Endpoint::instance().settings();
  Proposal proposal;
  if (connections.rank() == 0) {
    fill_random(proposal.job);
    settings.algorithm.copy(proposal.algorithm.data(), proposal.algorithm.size() - 1);
  }
  connections.broadcast(std::as_writable_bytes(std::span(&proposal, 1)), now_ns() + kAgreeNs);
  proposal.algorithm.back() = '\0';
  const auto agree = [&](const auto& work) {
    const std::int64_t began_ns = now_ns();
    const std::string problem = connections.first_problem(problem_of(work), began_ns, began_ns + kAgreeNs);
    if (!problem.empty()) throw std::runtime_error(problem);
  };

  control::JoinRequest request;
  request.job = hexadecimal(proposal.job);
  request.name = settings.job_name;
  request.rank = connections.rank();
  for (int each = 0; each < connections.size(); ++each) request.ranks.push_back(each);
  request.window_bytes = settings.window_bytes;
  request.security = settings.security;
  request.timeout_ns = kJoinNs;
  std::optional<control::PathToRoot> path;
  agree([&] {
    if (connections.rank() == 0) parse_algorithms(settings.algorithm);
    if (settings.switches.find(',') != std::string::npos) {
      throw std::invalid_argument("NETFOLD_SWITCH=" + settings.switches +
                                  " names several switches, and CollNet uses one: name that alone");
    }
    request.to = control::SwitchAddress::parse(settings.switches);
    request.token = control::read_token(settings.token_file);
    path = control::query_path_to_root(request);
  });
  request.tree = agreed_tree(connections, *path, agree);

  Joined joined;
  joined.algorithms = parse_algorithms(proposal.algorithm.data());
  joined.endpoint = request.to.endpoint();
  try {
    agree([&] {
      joined.membership = Membership::join(request);
      joined.channel = joined.membership->take_channel();
    });
  } catch (const std::exception&) {
    if (joined.membership != nullptr) joined.membership->leave("another rank of its communicator was refused");
    throw;
  }
  return joined;
}

std::shared_ptr<engine::Group> make_group(RankConnections connections, std::uint64_t id) {
  std::vector<std::unique_ptr<transport::Mesh>> fallback;
  fallback.push_back(std::move(connections.fallback));
  engine::Group::Options options;
  options.id = id;
  options.job = "nccl";
  options.table = host_choices();
  for (int each = 0; each < connections.size(); ++each) options.nodes.push_back(each);
  return Engine::instance().add_group(std::move(options), std::move(connections.mesh), std::move(connections.to_first),
                                      std::move(fallback));
}

}  // namespace

std::optional<DType> dtype_of(DataType type) {
  switch (type) {
    case DataType::i8:
      return DType::i8;
    case DataType::u8:
      return DType::u8;
    case DataType::i32:
      return DType::i32;
    case DataType::u32:
      return DType::u32;
    case DataType::i64:
      return DType::i64;
    case DataType::u64:
      return DType::u64;
    case DataType::f16:
      return DType::f16;
    case DataType::f32:
      return DType::f32;
    case DataType::f64:
      return DType::f64;
    case DataType::bf16:
      return DType::bf16;
  }
  return std::nullopt;  // floats of 8 bits
}

std::optional<ReduceOp> reduce_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return ReduceOp::sum;
    case Reduction::product:
      return ReduceOp::product;
    case Reduction::max:
      return ReduceOp::max;
    case Reduction::min:
      return ReduceOp::min;
  }
  return std::nullopt;  // NCCL's own
}

std::unique_ptr<CollComm> CollComm::connect(Listener& listener, std::span<const Handle> handles, int rank) {
  std::shared_ptr<engine::Group> group;
  std::shared_ptr<Recovery> recovery;
  MemberLinks links;
  const std::string problem = problem_of([&] {
    const int size = static_cast<int>(handles.size());
    if (size < 2 || rank < 0 || rank >= size) throw std::runtime_error("there is no other rank");
    RankConnections connections = RankConnections::connect(listener, handles, rank, now_ns() + kConnectNs);
    Joined joined = join(connections);
    const std::string endpoint = joined.endpoint;
    const std::uint64_t generation = joined.channel->generation();
    const bool is_hardware = joined.membership->hardware();
    links = std::move(connections.links);
    group = make_group(std::move(connections), generation);
    links.serve(group);
    group->attach(std::move(joined.channel), host_choices(), kTableWithoutSwitch, is_hardware);
    recovery = std::make_shared<Recovery>(group, std::move(joined.membership), generation);
    recovery->start();
    const std::string found = choose_paths(*group, joined.algorithms);
    inform("CollNet uses the switch at " + endpoint + " with " + std::to_string(size) + " ranks: " + found);
  });
  if (problem.empty())
    return std::unique_ptr<CollComm>(new CollComm(std::move(group), std::move(recovery), std::move(links)));
  if (recovery != nullptr) recovery->await_all();
  links.clear();
  if (recovery != nullptr) recovery->leave();
  const bool is_required = Endpoint::instance().settings().is_switch_required;
  warn(std::string("CollNet is not used, and ") +
       (is_required ? "NETFOLD_NCCL_REQUIRE_SWITCH=1 requires it: " : "NCCL's own algorithms are: ") + problem);
  return nullptr;
}

CollComm::CollComm(std::shared_ptr<engine::Group> group, std::shared_ptr<Recovery> recovery, MemberLinks links)
    : group_(std::move(group)), recovery_(std::move(recovery)), links_(std::move(links)) {
  for (Request& each : requests_) each.comm_ = this;
}

CollComm::~CollComm() {
  recovery_->await_all();
  links_.clear();  // before the other ranks close their ends, which is no break
  recovery_->leave();
}

CollComm::Request* CollComm::free_request() {
  const auto free = std::ranges::find(requests_, nullptr, &Request::operation_);
  return free == requests_.end() ? nullptr : &*free;
}

void CollComm::submit(Request& request, Call call, std::size_t bytes) {
  request.operation_ = group_->submit(std::move(call), -1, false);
  request.bytes_ = bytes;
}

CollComm::Request* CollComm::all_reduce(const std::byte* data, std::byte* into, std::size_t count, DType dtype,
                                        ReduceOp reduce) {
  Request* request = free_request();
  if (request == nullptr) return nullptr;
  const std::size_t bytes = count * kernels::element_bytes(dtype);
  if (data != into) std::memcpy(into, data, bytes);
  submit(*request, {.kind = Kind::all_reduce, .dtype = dtype, .reduce = reduce, .outputs = {{into, bytes}}}, bytes);
  return request;
}

std::vector<Buffer> CollComm::blocks(std::byte* data, const Window& window) const {
  const std::size_t end = window.offset + window.bytes;
  if (end > window.bytes_per_rank * static_cast<std::size_t>(group_->size()) || end < window.offset) {
    throw std::invalid_argument("a window ends at byte " + std::to_string(end) + " of " +
                                std::to_string(group_->size()) + " blocks of " + std::to_string(window.bytes_per_rank));
  }
  std::vector<Buffer> blocks;
  for (std::size_t at = window.offset, rank = 0; rank < static_cast<std::size_t>(group_->size()); ++rank) {
    const std::size_t until = std::clamp((rank + 1) * window.bytes_per_rank, at, end);
    blocks.push_back({data + (at - window.offset), until - at});
    at = until;
  }
  return blocks;
}

CollComm::Request* CollComm::all_gather(const std::byte* data, std::byte* into, const Window& window) {
  Request* request = free_request();
  if (request == nullptr) return nullptr;
  Call call{.kind = Kind::all_gather, .dtype = DType::u8};
  call.outputs = blocks(into, window);
  const std::size_t own = call.outputs[static_cast<std::size_t>(group_->rank())].bytes;
  call.inputs = {{const_cast<std::byte*>(data), own}};
  submit(*request, std::move(call), window.bytes);
  return request;
}

CollComm::Request* CollComm::reduce_scatter(const std::byte* data, std::byte* into, const Window& window, DType dtype,
                                            ReduceOp reduce) {
  Request* request = free_request();
  if (request == nullptr) return nullptr;
  Call call{.kind = Kind::reduce_scatter, .dtype = dtype, .reduce = reduce};
  call.inputs = blocks(const_cast<std::byte*>(data), window);
  const std::size_t unit = kernels::element_bytes(dtype);
  if (window.offset % unit != 0 || window.bytes % unit != 0 || window.bytes_per_rank % unit != 0) {
    throw std::invalid_argument("a window cuts an element of " + std::string(kernels::name(dtype)));
  }
  const std::size_t own = call.inputs[static_cast<std::size_t>(group_->rank())].bytes;
  call.outputs = {{into, own}};
  submit(*request, std::move(call), own);
  return request;
}

CollComm::Outcome CollComm::test(Request& request, int* bytes) {
  if (!request.operation_->done()) return Outcome::under_way;
  if (const auto& failure = request.operation_->failure()) {
    if (!has_reported_) warn("CollNet: " + failure.text);
    has_reported_ = true;
    return Outcome::failed;
  }
  if (bytes != nullptr) *bytes = static_cast<int>(request.bytes_);
  request.operation_.reset();
  return Outcome::done;
}

}  // namespace netfold::nccl
