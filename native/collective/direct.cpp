#include <netfold/collective/direct.hpp>
#include <netfold/kernels/convert.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

template <class T>
void divide_values(std::byte* data, std::size_t count, int ranks) {
  T value;
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    value /= static_cast<T>(ranks);
    std::memcpy(data + i * sizeof value, &value, sizeof value);
  }
}

}  // namespace

Direct::Direct(const Call& call, transport::Mesh& mesh, Team team) : call_(call), mesh_(mesh), team_(std::move(team)) {
  plan();
}

void Direct::send_to(int position, const Buffer& buffer) {
  outgoing_.emplace_back(call_, team_.rank(position), buffer.data, buffer.bytes, Among::only);
}

void Direct::receive_from(int position, const Buffer& buffer) {
  incoming_.emplace_back(call_, team_.rank(position), buffer.data, buffer.bytes, Among::only);
}

void Direct::plan() {
  const int me = team_.position();
  const bool root = me == call_.root;
  const auto& in = call_.inputs;
  const auto& out = call_.outputs;
  // Contributions to a reduction: mine stays where it is, the others' land in scratch.
  const auto gather_contributions = [&](const Buffer& mine) {
    const std::size_t bytes = mine.bytes;
    const std::size_t all = bytes * static_cast<std::size_t>(team_.size() - 1);
    if (goes_by_rma(bytes)) known_scratch_ = mesh_.scratch(team_.rank(me == 0 ? 1 : 0), all);
    if (known_scratch_ == nullptr) scratch_ = std::make_unique_for_overwrite<std::byte[]>(all);
    std::byte* next = known_scratch_ != nullptr ? known_scratch_->data() : scratch_.get();
    for (int rank = 0; rank < team_.size(); ++rank) {
      if (rank == me) {
        sources_.push_back(mine.data);
        continue;
      }
      sources_.push_back(next);
      receive_from(rank, {next, bytes});
      next += bytes;
    }
  };

  const auto is_large = [&](const Buffer& buffer) { return goes_by_rma(buffer.bytes); };
  if (std::any_of(in.begin(), in.end(), is_large) || std::any_of(out.begin(), out.end(), is_large)) {
    tensor_registrations_.acquire(call_, mesh_);
  }
  // Start with the next rank, so that not everybody talks to rank 0 first.
  for (int step = 1; step < team_.size(); ++step) {
    const int to = (me + step) % team_.size();
    const auto peer = static_cast<std::size_t>(to);
    switch (call_.kind) {
      case Kind::all_reduce:
        send_to(to, out[0]);
        break;
      case Kind::all_gather:
        send_to(to, in[0]);
        break;
      case Kind::all_to_all:
        send_to(to, in[peer]);
        break;
      case Kind::reduce_scatter:
        send_to(to, in[peer]);
        break;
      case Kind::barrier:
        send_to(to, {});
        break;
      case Kind::broadcast:
        if (root) send_to(to, out[0]);
        break;
      case Kind::scatter:
        if (root) send_to(to, in[peer]);
        break;
      case Kind::reduce:
        if (to == call_.root) send_to(to, out[0]);
        break;
      case Kind::gather:
        if (to == call_.root) send_to(to, in[0]);
        break;
      default:
        break;
    }
    const int from = (me + team_.size() - step) % team_.size();
    const auto source = static_cast<std::size_t>(from);
    switch (call_.kind) {
      case Kind::all_gather:
      case Kind::all_to_all:
        receive_from(from, out[source]);
        break;
      case Kind::barrier:
        receive_from(from, {});
        break;
      case Kind::gather:
        if (root) receive_from(from, out[source]);
        break;
      case Kind::broadcast:
      case Kind::scatter:
        if (from == call_.root) receive_from(from, out[0]);
        break;
      default:
        break;
    }
  }
  const auto self = static_cast<std::size_t>(me);
  if (call_.kind == Kind::all_reduce || (call_.kind == Kind::reduce && root)) gather_contributions(out[0]);
  if (call_.kind == Kind::reduce_scatter) gather_contributions(in[self]);
  if (call_.kind == Kind::all_gather || (call_.kind == Kind::gather && root)) copy_block(out[self], in[0]);
  if (call_.kind == Kind::all_to_all) copy_block(out[self], in[self]);
  if (call_.kind == Kind::scatter && root) copy_block(out[0], in[self]);
}

bool Direct::goes_by_rma(std::size_t bytes) const {
  const int other = team_.position() == 0 ? 1 : 0;
  return team_.size() > 1 && mesh_.uses_rma(team_.rank(other), std::min(bytes, kRmaChunkBytes));
}

Progress Direct::poll(std::int64_t) {
  bool moved = false;
  bool done = true;
  for (Outgoing& message : outgoing_) {
    const std::size_t bytes = message.advance(mesh_, failure_);
    wire_bytes_ += bytes;
    moved |= bytes > 0;
    done &= message.done();
    if (failure_) {
      // Nothing else may be expected from that peer: what it said last is read here or nowhere.
      const auto is_from_it = [&](const Incoming& other) { return other.peer() == message.peer(); };
      if (std::none_of(incoming_.begin(), incoming_.end(), is_from_it)) {
        failure_ = read_last_abort(mesh_, message.peer(), call_, std::move(failure_));
      }
      break;
    }
  }
  // A peer that gave up says why on its connection before it closes it; that is worth more than a broken
  // pipe.
  for (Incoming& message : incoming_) {
    if (message.done()) continue;
    Failure heard;
    moved |= message.advance(mesh_, heard) > 0;
    if (heard) failure_ = std::move(heard);
    done &= message.done();
    if (failure_) break;
  }
  if (failure_) return Progress::failed;
  if (!done) return moved ? Progress::moved : Progress::idle;
  registrations_ = tensor_registrations_.registrations();
  finish();
  return Progress::done;
}

void Direct::finish() {
  if (sources_.empty()) return;
  const Buffer& out = call_.outputs[0];
  const std::size_t count = out.bytes / kernels::element_bytes(call_.dtype);
  kernels::reduce(call_.reduce, call_.dtype, out.data, sources_.data(), sources_.size(), count);
  if (call_.average) divide(call_.dtype, out, team_.size());
}

void Direct::wait_for(WaitSet& set) const {
  for (const Outgoing& message : outgoing_) {
    if (!message.done()) mesh_.wait_for(message.peer(), message.events(), set.fds);
  }
  for (const Incoming& message : incoming_) {
    if (!message.done()) mesh_.wait_for(message.peer(), POLLIN, set.fds);
  }
}

std::vector<int> Direct::awaited() const {
  std::vector<int> ranks;
  for (const Incoming& message : incoming_) {
    if (!message.done()) ranks.push_back(message.peer());
  }
  if (ranks.empty()) {
    for (const Outgoing& message : outgoing_) {
      if (!message.done()) ranks.push_back(message.peer());
    }
  }
  return ranks;
}

void divide(kernels::DType dtype, const Buffer& buffer, int ranks) {
  using kernels::DType;
  const std::size_t count = buffer.bytes / kernels::element_bytes(dtype);
  if (dtype == DType::f32) return divide_values<float>(buffer.data, count, ranks);
  if (dtype == DType::f64) return divide_values<double>(buffer.data, count, ranks);
  if (dtype != DType::f16 && dtype != DType::bf16) return;
  constexpr std::size_t kBlock = 1024;
  float block[kBlock];
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t some = std::min(kBlock, count - i);
    kernels::convert(DType::f32, block, dtype, buffer.data + 2 * i, some);
    for (std::size_t k = 0; k < some; ++k) block[k] /= static_cast<float>(ranks);
    kernels::convert(dtype, buffer.data + 2 * i, DType::f32, block, some);
  }
}

}  // namespace netfold::collective
