// The connections among the ranks of a collective communicator, and the agreement of its ranks before the first
// operation.
//
// Each pair of ranks has two connections: for host algorithms beside the switch, and for those in place of a lost switch
// (collective/switch_path.hpp). Each rank has one more to rank 0, for agreements. Once a group has them, connections that
// break are made again (member_link.hpp); before, a break is the end.
#pragma once

#include <netfold/transport/mesh.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "endpoint.hpp"
#include "member_link.hpp"

namespace netfold::nccl {

// A rank's connections to the other ranks of a communicator. The endpoint watches them until `clear` or the destructor.
class MemberLinks {
 public:
  MemberLinks() = default;
  ~MemberLinks() { clear(); }
  MemberLinks(MemberLinks&&) noexcept = default;
  MemberLinks& operator=(MemberLinks&&) noexcept = default;

  void add(std::shared_ptr<MemberLink> link, const Handle& peer);
  void serve(const std::shared_ptr<engine::Group>& group) const;
  void clear();

 private:
  std::vector<std::shared_ptr<MemberLink>> links_;
};

struct RankConnections {
  MemberLinks links;
  std::unique_ptr<transport::Mesh> mesh, to_first, fallback;

  int rank() const { return mesh->rank(); }
  int size() const { return mesh->size(); }

  // Connects to all other ranks; each of them calls this with the same handles. Blocks. Throws std::runtime_error with
  // the rank that cannot be reached.
  static RankConnections connect(Listener& listener, std::span<const Handle> handles, int rank,
                                 std::int64_t deadline_ns);

  // The same bytes on every rank: those of rank 0. Each function blocks, and every rank calls it.
  // Throws std::runtime_error with the rank that did not answer until `deadline_ns`, or is gone.
  void broadcast(std::span<std::byte> bytes, std::int64_t deadline_ns);
  // Collects the bytes of all ranks at rank 0, by rank; other ranks get an empty vector. A rank sends kMostBytes at most.
  std::vector<std::vector<std::byte>> gather(std::vector<std::byte> own, std::int64_t deadline_ns);
  // Each rank gets its own of those that rank 0 has.
  std::vector<std::byte> scatter(std::span<const std::span<const std::byte>> of_ranks, std::int64_t deadline_ns);
  static constexpr std::size_t kMostBytes = 1 << 20;
  // own: why this rank cannot go on; empty: it can. began_ns: when it began to find out.
  // Returns the same on every rank: "rank 3: why" of the problem that came up soonest, which may be the cause of others;
  // nothing where all can go on.
  std::string first_problem(const std::string& own, std::int64_t began_ns, std::int64_t deadline_ns);
};

}  // namespace netfold::nccl
