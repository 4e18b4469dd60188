// The ranks of a group by host, and the ranks' buffers laid out in memory host by host.
#pragma once

#include <netfold/collective/call.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace netfold::collective {

class HostMap {
 public:
  // `nodes`: the host of each rank, by any number. Hosts are numbered by their first ranks. `rank`: this one.
  HostMap(std::span<const int> nodes, int rank) : host_of_(nodes.size()) {
    std::map<int, std::size_t> numbers;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const auto [entry, is_new] = numbers.try_emplace(nodes[i], ranks_.size());
      if (is_new) ranks_.emplace_back();
      ranks_[entry->second].push_back(static_cast<int>(i));
      host_of_[i] = entry->second;
    }
    for (const std::size_t host : host_of_) {
      ranks_beside_.push_back(static_cast<std::uint32_t>(ranks_[host].size()));
    }
    own_ = host_of(rank);
    own_position_ = position(rank);
    for (const auto& host : ranks_) {
      first_ranks_.push_back(host.front());
      if (host.size() == own_ranks().size()) counterparts_.push_back(host[own_position_]);
    }
  }

  std::size_t size() const { return ranks_.size(); }
  std::size_t own() const { return own_; }                // the number of this rank's host
  std::size_t position() const { return own_position_; }  // of this rank on its host
  // Ranks of a host, ascending.
  const std::vector<int>& ranks(std::size_t host) const { return ranks_[host]; }
  const std::vector<int>& own_ranks() const { return ranks_[own_]; }
  // By host: its first rank.
  const std::vector<int>& first_ranks() const { return first_ranks_; }
  // Whether all hosts have equally many ranks; and then, by host, the rank at this rank's position.
  bool is_even() const { return counterparts_.size() == size(); }
  const std::vector<int>& counterparts() const { return counterparts_; }
  // By rank: how many ranks its host has.
  std::span<const std::uint32_t> ranks_beside() const { return ranks_beside_; }
  std::size_t host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }

  // Takes a rank of this host.
  std::size_t position(int rank) const {
    return static_cast<std::size_t>(std::ranges::lower_bound(own_ranks(), rank) - own_ranks().begin());
  }

  // The buffers of this host's ranks.
  std::vector<Buffer> of_own_host(const std::vector<Buffer>& of_ranks) const {
    std::vector<Buffer> buffers;
    for (const int rank : own_ranks()) buffers.push_back(of_ranks[static_cast<std::size_t>(rank)]);
    return buffers;
  }

  // A buffer for each rank. The buffers of a host are contiguous, and so are those of all hosts, in order.
  struct Blocks {
    std::vector<Buffer> of_rank;
    std::vector<Buffer> of_host;
    Buffer whole;
  };
  // Buffers of the given sizes in `memory`.
  Blocks laid_out(const std::vector<Buffer>& sizes, std::byte* memory) const {
    Blocks blocks{.of_rank = sizes, .of_host = {}, .whole = {memory, 0}};
    for (const auto& host : ranks_) {
      Buffer of_host{memory + blocks.whole.bytes, 0};
      for (const int rank : host) {
        Buffer& buffer = blocks.of_rank[static_cast<std::size_t>(rank)];
        buffer.data = of_host.data + of_host.bytes;
        of_host.bytes += buffer.bytes;
      }
      blocks.of_host.push_back(of_host);
      blocks.whole.bytes += of_host.bytes;
    }
    return blocks;
  }

  // The given buffers, where they are laid out like this already.
  std::optional<Blocks> in_place(const std::vector<Buffer>& buffers) const {
    std::byte* first = nullptr;
    for (const auto& host : ranks_) {
      for (const int rank : host) {
        const Buffer& buffer = buffers[static_cast<std::size_t>(rank)];
        if (first == nullptr && buffer.bytes > 0) first = buffer.data;
      }
    }
    Blocks blocks = laid_out(buffers, first);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (buffers[i].bytes > 0 && buffers[i].data != blocks.of_rank[i].data) return std::nullopt;
    }
    return blocks;
  }

 private:
  std::vector<std::vector<int>> ranks_;
  std::vector<int> first_ranks_;
  std::vector<int> counterparts_;
  std::vector<std::size_t> host_of_;
  std::vector<std::uint32_t> ranks_beside_;
  std::size_t own_;
  std::size_t own_position_;
};

}  // namespace netfold::collective
