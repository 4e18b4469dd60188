#include <netfold/collective/contribution_map.hpp>
#include <netfold/kernels/convert.hpp>

#include <algorithm>
#include <array>
#include <cstring>

namespace netfold::collective {
namespace {

using kernels::DType;

// The unsigned integer that holds an element's bits; a pair of 16 bytes is two integers.
DType bits_of(DType dtype) {
  switch (kernels::element_bytes(dtype)) {
    case 1:
      return DType::u8;
    case 2:
      return DType::u16;
    case 4:
      return DType::u32;
    default:
      return DType::u64;
  }
}

std::uint32_t xor_fold(std::uint64_t digest) { return static_cast<std::uint32_t>(digest ^ digest >> 32); }

}  // namespace

ContributionMap::ContributionMap(const Call& call, const Team& team)
    : dtype_(call.dtype),
      wire_(call.wire),
      reduce_(call.reduce),
      reduction_(call, team),
      position_(team.position()),
      scales_(kernels::is_float(call.dtype) && reduction_.scale_of(position_) != 1) {
  const bool root = position_ == call.root;
  const auto self = static_cast<std::size_t>(position_);
  const auto ranks = static_cast<std::size_t>(team.size());
  const bool moves = call.kind == Kind::broadcast || call.kind == Kind::all_gather || call.kind == Kind::barrier;
  if (moves) {
    dtype_ = wire_ = call.kind == Kind::barrier ? DType::u8 : bits_of(call.dtype);
    reduce_ = kernels::ReduceOp::bor;
  }
  size_digest_ = static_cast<std::uint32_t>(call.elements());
  switch (call.kind) {
    case Kind::reduce:
      add(call.outputs[0].bytes, call.outputs[0].data, root ? call.outputs[0].data : nullptr);
      break;
    case Kind::broadcast:
      add(call.outputs[0].bytes, root ? call.outputs[0].data : nullptr, root ? nullptr : call.outputs[0].data);
      break;
    case Kind::reduce_scatter:
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        add(call.inputs[rank].bytes, call.inputs[rank].data, rank == self ? call.outputs[0].data : nullptr);
      }
      size_digest_ = xor_fold(call.layout != 0 ? call.layout : layout_of(call.inputs));
      break;
    case Kind::all_gather:
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const Buffer& block = call.outputs[rank];
        add(block.bytes, rank == self ? call.inputs[0].data : nullptr, block.data);
      }
      size_digest_ = xor_fold(call.layout != 0 ? call.layout : layout_of(call.outputs));
      break;
    case Kind::barrier:
      add(1, nullptr, nullptr);
      break;
    default:
      add(call.outputs[0].bytes, call.outputs[0].data, call.outputs[0].data);
      if (call.layout != 0) size_digest_ = xor_fold(call.layout) | kCoalescedDigest;
      break;
  }
}

void ContributionMap::add(std::size_t bytes, const std::byte* from, std::byte* to) {
  const std::size_t count = bytes / kernels::element_bytes(dtype_);
  if (count == 0) return;
  segments_.push_back({elements_, count, from, to});
  elements_ += count;
}

template <class Visit>
void ContributionMap::each(std::size_t first, std::size_t count, const Visit& visit) const {
  auto segment = std::ranges::upper_bound(segments_, first, {}, &Segment::first) - 1;
  for (std::size_t done = 0; done < count; ++segment) {
    const std::size_t at = first + done - segment->first;
    const std::size_t size = std::min(count - done, segment->count - at);
    visit(*segment, at, size, done);
    done += size;
  }
}

const std::byte* ContributionMap::contribution(std::size_t first, std::size_t count, std::byte* staging,
                                               const std::byte* zeros) const {
  const std::size_t unit = kernels::element_bytes(dtype_);
  const std::size_t wire_unit = kernels::element_bytes(wire_);
  const std::byte* whole = nullptr;
  each(first, count, [&](const Segment& segment, std::size_t at, std::size_t size, std::size_t done) {
    if (size == count && segment.from == nullptr) {
      whole = zeros;
    } else if (size == count && dtype_ == wire_ && !scales_) {
      whole = segment.from + at * unit;
    } else if (segment.from == nullptr) {
      std::memset(staging + done * wire_unit, 0, size * wire_unit);
    } else {
      put(staging + done * wire_unit, segment.from + at * unit, size);
    }
  });
  return whole != nullptr ? whole : staging;
}

// Writes this rank's values in the wire format, as terms of an average where the call is one.
void ContributionMap::put(std::byte* to, const std::byte* from, std::size_t count) const {
  if (!scales_) {
    kernels::convert(wire_, to, dtype_, from, count);
    return;
  }
  if (dtype_ == wire_) return reduction_.scale(position_, to, from, count);
  const std::size_t unit = kernels::element_bytes(dtype_);
  const std::size_t wire_unit = kernels::element_bytes(wire_);
  std::array<std::byte, 4096> terms;
  for (std::size_t done = 0; done < count;) {
    const std::size_t size = std::min(count - done, terms.size() / unit);
    reduction_.scale(position_, terms.data(), from + done * unit, size);
    kernels::convert(wire_, to + done * wire_unit, dtype_, terms.data(), size);
    done += size;
  }
}

void ContributionMap::deliver(std::size_t first, std::size_t count, const std::byte* values) const {
  each(first, count, [&](const Segment& segment, std::size_t at, std::size_t size, std::size_t done) {
    if (segment.to == nullptr) return;
    std::byte* to = segment.to + at * kernels::element_bytes(dtype_);
    const std::byte* from = values + done * kernels::element_bytes(wire_);
    if (!reduction_.divides()) {
      kernels::convert(dtype_, to, wire_, from, size);
    } else if (dtype_ == wire_) {
      reduction_.divide(to, from, size);
    } else {
      kernels::convert(dtype_, to, wire_, from, size);
      reduction_.divide(to, to, size);
    }
  });
}

}  // namespace netfold::collective
