// Direct exchange: every rank sends what other ranks need straight to them, all at once; reductions follow locally.
//
// One step. Bytes sent by a rank of P, for n bytes of tensor:
//
//   all_reduce, all_gather      (P-1)n
//   reduce_scatter, all_to_all  (P-1)n/P
//   broadcast, scatter          the root (P-1)n
//   gather, reduce              n to the root
//   barrier                     a header to every rank
//
// Best for small messages (one latency), and a simple reference for all sizes. Reductions add in rank order, so every
// rank gets the same bits. They begin with the first bytes that have arrived from all, so that a slow link does not wait
// for a sum.
//
// The pairwise all_to_all is this exchange with one partner a step, in P-1 steps: in step s a rank sends to the rank s
// positions ahead and receives from the rank s positions behind. So all ranks never send to one rank together, which
// would cause losses at a switch's port. A rank sends the next block when the socket has this block and the previous
// block has arrived: the latency of one step overlaps the next step. The messages and their headers are the same, so
// ranks whose sizes differ may choose different algorithms of the two.
#include <netfold/collective/message.hpp>
#include <netfold/collective/reduction.hpp>

#include <algorithm>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class Direct final : public Algorithm {
 public:
  // A reduction allocates scratch of (P-1) times the output.
  Direct(const Call& call, transport::Mesh& mesh, Team team)
      : call_(call),
        mesh_(mesh),
        team_(std::move(team)),
        reduction_(call, team_),
        is_paced_(call.algorithm == AlgorithmId::pairwise) {
    plan();
  }

  Progress poll(std::int64_t now_ns) override {
    if (gave_up_timer_.is_due(now_ns) && find_gave_up()) return Progress::failed;
    bool moved = send();
    moved |= copies_.advance();  // the other ranks need not wait for this
    moved |= receive();
    if (failure_) return Progress::failed;
    moved |= reduce_arrived();
    if (sent_ < outgoing_.size() || received_ < incoming_.size() || !copies_.done() || !all_reduced()) {
      return moved ? Progress::moved : Progress::idle;
    }
    if (find_gave_up()) return Progress::failed;
    counts_.registrations = tensor_registrations_.registrations();
    return Progress::done;
  }

  void wait_for(WaitSet& set) const override {
    for (std::size_t i = sent_; i < window_end(outgoing_.size()); ++i) {
      if (!outgoing_[i].done()) mesh_.wait_for(outgoing_[i].peer(), outgoing_[i].events(), set.fds);
      if (is_paced_) break;
    }
    for (std::size_t i = received_; i < window_end(incoming_.size()); ++i) {
      if (!incoming_[i].done()) mesh_.wait_for(incoming_[i].peer(), POLLIN, set.fds);
    }
    set.wake_at(gave_up_timer_.wake_ns());
    if (!gave_up_timer_.has_looked()) return;
    for_each_silent([&](int peer) { mesh_.wait_to_peek(peer, set.fds); });
  }

  std::vector<int> awaited() const override {
    std::vector<int> ranks;
    for (const Incoming& message : incoming_) {
      if (!message.done()) ranks.push_back(message.peer());
    }
    if (!ranks.empty()) return ranks;
    for (const Outgoing& message : outgoing_) {
      if (!message.done()) ranks.push_back(message.peer());
      if (is_paced_ && !ranks.empty()) break;  // a paced exchange has sent to one rank only
    }
    return ranks;
  }

 private:
  // A rank sends, and receives, so many blocks at a time in a paced exchange.
  static constexpr std::size_t kAtOnce = 2;
  // A part of a reduction: few enough bytes that they are still in the L2 cache.
  static constexpr std::size_t kReduceBytes = 64 << 10;

  void plan() {
    const int me = team_.position();
    const auto is_large = [&](const Buffer& buffer) { return goes_by_rma(buffer.bytes); };
    if (std::ranges::any_of(call_.inputs, is_large) || std::ranges::any_of(call_.outputs, is_large)) {
      tensor_registrations_.acquire(call_, mesh_);
    }
    // Start with the next rank, so that the ranks do not all send to rank 0 first.
    for (int step = 1; step < team_.size(); ++step) {
      const int to = team_.wrapped(me + step);
      const int from = team_.wrapped(me - step);
      if (call_.kind == Kind::barrier) {
        send_to(to, {});
        receive_from(from, {});
      }
      if (const Buffer* given = call_.given_to(me, to)) send_to(to, *given);
      if (const Buffer* taken = call_.taken_from(me, from)) receive_from(from, *taken);
    }
    const bool reduces = call_.kind == Kind::all_reduce || call_.kind == Kind::reduce_scatter ||
                         (call_.kind == Kind::reduce && me == call_.root);
    if (reduces) gather_contributions(*call_.given_to(me, me));
    copies_.add_own_block(call_, me);
    // A paced exchange moves few messages at a time.
    slice_bytes_ = slice_bytes(is_paced_ ? 2 * kAtOnce : outgoing_.size() + incoming_.size());
  }

  void send_to(int position, const Buffer& buffer) {
    outgoing_.emplace_back(call_, team_.rank(position), buffer.data, buffer.bytes, Among::only);
  }

  void receive_from(int position, const Buffer& buffer) {
    incoming_.emplace_back(call_, team_.rank(position), buffer.data, buffer.bytes, Among::only);
  }

  // Receives every other rank's contribution into scratch; `own` stays where it is.
  void gather_contributions(const Buffer& own) {
    const int me = team_.position();
    const std::size_t all = own.bytes * static_cast<std::size_t>(team_.size() - 1);
    if (goes_by_rma(own.bytes)) scratch_ = mesh_.scratch(team_.rank(me == 0 ? 1 : 0), all);
    if (scratch_ == nullptr) scratch_ = std::make_unique_for_overwrite<std::byte[]>(all);
    std::byte* next = scratch_.get();
    for (int position = 0; position < team_.size(); ++position) {
      if (position == me) {
        sources_.push_back(own.data);
        continue;
      }
      sources_.push_back(next);
      receive_from(position, {next, own.bytes});
      next += own.bytes;
    }
  }

  bool goes_by_rma(std::size_t bytes) const {
    const int other = team_.position() == 0 ? 1 : 0;
    return team_.size() > 1 && mesh_.uses_rma(team_.rank(other), std::min(bytes, kRmaChunkBytes));
  }

  // Messages below this index may travel now; of those to send, a paced exchange tries one at a time.
  std::size_t window_end(std::size_t messages) const {
    return is_paced_ ? std::min(messages, received_ + kAtOnce) : messages;
  }
  bool send() {
    bool moved = false;
    for (std::size_t i = sent_; i < window_end(outgoing_.size()); ++i) {
      Outgoing& message = outgoing_[i];
      const std::size_t bytes = message.advance(mesh_, failure_, slice_bytes_);
      counts_.wire_bytes += bytes;
      moved |= bytes > 0;
      if (failure_) {
        // A peer that owes no message can still abort, and only this read notices.
        const auto is_from_peer = [&](const Incoming& other) { return other.peer() == message.peer(); };
        if (std::none_of(incoming_.begin(), incoming_.end(), is_from_peer)) {
          failure_ = read_last_abort(mesh_, message.peer(), call_, std::move(failure_));
        }
        break;
      }
      if (is_paced_ && !message.done()) break;
    }
    while (sent_ < outgoing_.size() && outgoing_[sent_].done()) ++sent_;
    return moved;
  }

  // Reads after a failed send too: the peer's abort says more than the broken connection.
  bool receive() {
    bool moved = false;
    for (std::size_t i = received_; i < window_end(incoming_.size()); ++i) {
      if (incoming_[i].done()) continue;
      Failure reported;
      moved |= incoming_[i].advance(mesh_, reported, slice_bytes_) > 0;
      const bool is_last = reported || (failure_ && !is_paced_);
      if (reported) failure_ = std::move(reported);
      if (is_last) break;
    }
    while (received_ < incoming_.size() && incoming_[received_].done()) ++received_;
    return moved;
  }

  bool all_reduced() const {
    return sources_.empty() || call_.outputs[0].bytes - reduced_ < kernels::element_bytes(call_.dtype);
  }

  // The ranks of the call that send nothing more in it. Those that this rank receives from are those that it sends to,
  // unless it only sends.
  template <class Visit>
  void for_each_silent(const Visit& visit) const {
    for (const Incoming& message : incoming_) {
      if (message.done()) visit(message.peer());
    }
    for (std::size_t i = 0; i < outgoing_.size() && incoming_.empty(); ++i) visit(outgoing_[i].peer());
  }

  bool find_gave_up() {
    for_each_silent([this](int peer) {
      if (!failure_) failure_ = collective::find_gave_up(mesh_, peer, call_);
    });
    return static_cast<bool>(failure_);
  }

  // Adds a slice of what has arrived from all other ranks. Returns whether there was anything to add.
  bool reduce_arrived() {
    if (sources_.empty()) return false;
    const Buffer& out = call_.outputs[0];
    std::size_t ready = out.bytes;
    for (const Incoming& message : incoming_) ready = std::min(ready, message.received());
    // The sum replaces the values, so that they must be sent before.
    for (const Outgoing& message : outgoing_) ready = std::min(ready, message.free_before(mesh_, out));
    if (ready < out.bytes && ready < reduced_ + kReduceBytes) return false;
    const std::size_t unit = kernels::element_bytes(call_.dtype);
    const std::size_t most = std::max(kReduceBytes, kSliceBytes / sources_.size());
    const Buffer part{out.data + reduced_, std::min(most, ready - reduced_) / unit * unit};
    if (part.bytes == 0) return false;
    parts_.clear();
    for (const std::byte* source : sources_) parts_.push_back(source + reduced_);
    reduction_.reduce(part.data, parts_, part.bytes / unit);
    reduced_ += part.bytes;
    return true;
  }

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  Reduction reduction_;
  const bool is_paced_;
  GaveUpTimer gave_up_timer_;
  std::vector<Outgoing> outgoing_;  // by step
  std::vector<Incoming> incoming_;
  std::size_t sent_ = 0;      // all messages below are sent
  std::size_t received_ = 0;  // all messages below are received
  TensorRegistrations tensor_registrations_;
  transport::Pipe::Scratch scratch_;
  std::vector<const std::byte*> sources_;  // to reduce, in rank order; empty where nothing is reduced
  std::vector<const void*> parts_;         // of sources_
  std::size_t reduced_ = 0;                // bytes
  BlockCopies copies_;
  std::size_t slice_bytes_ = 0;  // of a message
};

}  // namespace

std::unique_ptr<Algorithm> make_direct(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<Direct>(call, paths.mesh, std::move(team));
}

}  // namespace netfold::collective
