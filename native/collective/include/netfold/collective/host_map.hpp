// The ranks of a group by host, and the ranks' buffers laid out in memory host by host.
#pragma once

#include <netfold/collective/call.hpp>

#include <optional>
#include <span>
#include <vector>

namespace netfold::collective {

class HostMap {
 public:
  // `nodes`: the host of each rank, by any number. Hosts are numbered by their first ranks. `rank`: this one.
  HostMap(std::span<const int> nodes, int rank);

  std::size_t size() const { return ranks_.size(); }
  std::size_t own() const { return own_; }                  // the number of this rank's host
  std::size_t position() const { return position(rank_); }  // of this rank on its host
  // Ranks of a host, ascending.
  const std::vector<int>& ranks(std::size_t host) const { return ranks_[host]; }
  const std::vector<int>& own_ranks() const { return ranks_[own_]; }
  std::size_t host_of(int rank) const;
  // Of a rank of this host.
  std::size_t position(int rank) const;
  // The buffers of this host's ranks.
  std::vector<Buffer> of_own_host(const std::vector<Buffer>& of_ranks) const;

  // A buffer for each rank. The buffers of a host are contiguous, and so are those of all hosts, in order.
  struct Blocks {
    std::vector<Buffer> of_rank;
    std::vector<Buffer> of_host;
    Buffer whole;
  };
  // Buffers of the given sizes in `memory`.
  Blocks laid_out(const std::vector<Buffer>& sizes, std::byte* memory) const;
  // The given buffers, where they are laid out like this already.
  std::optional<Blocks> in_place(const std::vector<Buffer>& buffers) const;

 private:
  std::vector<std::vector<int>> ranks_;
  int rank_;
  std::size_t own_;
};

}  // namespace netfold::collective
