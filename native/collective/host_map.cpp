#include <netfold/collective/host_map.hpp>

#include <algorithm>
#include <map>

namespace netfold::collective {

HostMap::HostMap(std::span<const int> nodes, int rank) : rank_(rank) {
  std::map<int, std::size_t> numbers;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto [entry, is_new] = numbers.try_emplace(nodes[i], ranks_.size());
    if (is_new) ranks_.emplace_back();
    ranks_[entry->second].push_back(static_cast<int>(i));
  }
  own_ = host_of(rank);
}

std::size_t HostMap::host_of(int rank) const {
  const auto has_rank = [&](const std::vector<int>& host) { return std::ranges::find(host, rank) != host.end(); };
  return static_cast<std::size_t>(std::ranges::find_if(ranks_, has_rank) - ranks_.begin());
}

std::size_t HostMap::position(int rank) const {
  return static_cast<std::size_t>(std::ranges::find(own_ranks(), rank) - own_ranks().begin());
}

std::vector<Buffer> HostMap::of_own_host(const std::vector<Buffer>& of_ranks) const {
  std::vector<Buffer> buffers;
  for (const int rank : own_ranks()) buffers.push_back(of_ranks[static_cast<std::size_t>(rank)]);
  return buffers;
}

HostMap::Blocks HostMap::laid_out(const std::vector<Buffer>& sizes, std::byte* memory) const {
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

std::optional<HostMap::Blocks> HostMap::in_place(const std::vector<Buffer>& buffers) const {
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

}  // namespace netfold::collective
