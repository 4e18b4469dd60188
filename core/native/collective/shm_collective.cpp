#include <netfold/collective/shm_collective.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {

// A table of sizes and references to as many buffers fit in a post.
static_assert(transport::ShmNode::kMaxSize * (sizeof(std::uint64_t) + 2 * sizeof(std::uint64_t)) <=
              transport::ShmNode::kPostBytes);
static_assert(transport::ShmNode::kSlotBytes / transport::ShmNode::kMaxSize >= 64);

ShmCollective::ShmCollective(const Call& call, transport::Mesh& mesh, Node& node)
    : call_(call),
      mesh_(mesh),
      node_(node),
      self_(node.self()),
      size_(node.size()),
      part_bytes_(Node::kSlotBytes / index(node.size()) / kLine * kLine),
      others_(index(node.size())),
      number_(node.next_call()),
      read_(index(node.size())),
      leaving_(index(node.size())) {
  own_.header = MessageHeader::of(call, 0);
}

Progress ShmCollective::poll(std::int64_t now_ns) {
  bool moved = !posted_ && post();
  if (posted_ && !all_posts_read_) moved |= read_posts();
  if (failure_) return Progress::failed;
  if (all_posts_read_) {
    moved |= advance();
    if (failure_) return Progress::failed;
    if (done()) {
      // Of two ranks in one call, the rank whose post comes second sees the other's here: each posts, then passes a full
      // fence (ShmNode::publish), then reads. Until this rank has finished the call, no other rank uses a post again.
      if (!all_read_) check_posts();
      if (!failure_) find_gave_up();
      if (failure_) return Progress::failed;
      if (own_.rounds > 0) node_.set_last_stream_call(number_);
      node_.publish(node_.own().done, number_);
      return Progress::done;
    }
  }
  if (moved) return Progress::moved;
  if (posted_ && !all_read_) check_posts();
  if (!failure_) check_peers(now_ns);
  return failure_ ? Progress::failed : Progress::idle;
}

void ShmCollective::check_peers(std::int64_t now_ns) {
  if (look_ns_ < 0) look_ns_ = now_ns + kLookNs;
  check_due_ = now_ns < next_check_ns_;
  if (check_due_) return;
  looks_ = now_ns >= look_ns_;
  if (looks_) look_ns_ = now_ns + (looked_at_ < size_ ? 1 : (size_ + kLooks - 1) / kLooks) * kLookNs;
  find_lost();
  check_due_ = std::find(leaving_.begin(), leaving_.end(), true) != leaving_.end();
  next_check_ns_ = now_ns + kCheckNs;
}

bool ShmCollective::post() {
  if (!post_is_free()) return false;
  // Not in a small call, whose latency would grow.
  if (own_.rounds > 0) node_.fd_exchange().exchange();
  Node::Post& post = node_.post(self_, number_);
  write_post(post.data);
  std::memcpy(post.announcement, &own_, sizeof own_);
  node_.publish(post.call, number_);
  posted_ = true;
  // Of two ranks in different calls, a rank that reads the other's post reports that. A rank that waits for posts may
  // sleep until the post of a third rank comes.
  if (!reads_all_posts()) node_.ring_all_doorbells();
  return true;
}

bool ShmCollective::post_is_free() {
  if (node_.finished_by_all() + Node::kPosts >= number_) return true;
  std::uint64_t finished = number_ - 1;
  for (int position = 0; position < size_; ++position) {
    if (position != self_) finished = std::min(finished, node_.segment(position).done.load(std::memory_order_acquire));
  }
  node_.set_finished_by_all(finished);
  return finished + Node::kPosts >= number_;
}

bool ShmCollective::reads_all_posts() const {
  for (int position = 0; position < size_; ++position) {
    if (position != self_ && !needs_post(position)) return false;
  }
  return true;
}

bool ShmCollective::read_posts() {
  bool all = true;
  bool moved = false;
  for (int position = 0; position < size_ && !failure_; ++position) {
    if (position == self_ || read_[index(position)] || !needs_post(position)) continue;
    if (node_.post(position, number_).call.load(std::memory_order_acquire) != number_) {
      all = false;
      continue;
    }
    read_post(position);
    moved = true;
  }
  all_posts_read_ = all && !failure_;
  all_read_ = all_posts_read_ && reads_all_posts();
  // A rank that has posted this call has finished the call before.
  if (all_read_) node_.set_finished_by_all(number_ - 1);
  return moved || all_posts_read_;
}

void ShmCollective::read_post(int position) {
  Announcement& other = others_[index(position)];
  std::memcpy(&other, node_.post(position, number_).announcement, sizeof other);
  read_[index(position)] = true;
  compare(position);
}

void ShmCollective::await_posts() const {
  for (int position = 0; position < size_; ++position) {
    if (position != self_ && !read_[index(position)]) node_.await(position);
  }
}

void ShmCollective::check_posts() {
  bool all = true;
  for (int position = 0; position < size_ && !failure_; ++position) {
    if (position == self_ || read_[index(position)]) continue;
    if (node_.post(position, number_).call.load(std::memory_order_acquire) == number_) {
      read_post(position);
    } else {
      all = false;
    }
  }
  all_read_ = all && !failure_;
}

// A rank that failed with no more than an earlier call finished has given this call up, whatever it had sent before. One
// that finished the call and failed later, or left in order, takes nothing from this rank's success. Cost: a load for
// each rank, of a line that nobody writes before a failure.
void ShmCollective::find_gave_up() {
  for (int position = 0; position < size_ && !failure_; ++position) {
    if (position == self_) continue;
    const Node::Segment& segment = node_.segment(position);
    if (segment.left.load(std::memory_order_acquire) != Node::kFailed) continue;
    if (segment.done.load(std::memory_order_acquire) < number_) read_failure(position);
  }
}

void ShmCollective::compare(int position) {
  MessageHeader theirs = others_[index(position)].header;
  MessageHeader expected = own_.header;
  // The size is not known where this rank takes no data of that rank.
  expected.bytes = needs_post(position) ? expected_bytes(position) : theirs.bytes;
  if (needs_post(position) && has_table() && theirs.kind == expected.kind &&
      call_.algorithm == AlgorithmId::shared_memory) {
    const std::byte* entry = post_data(position) + index(self_) * sizeof(std::uint64_t);
    std::memcpy(&theirs.bytes, entry, sizeof theirs.bytes);
  }
  if (std::memcmp(&expected, &theirs, sizeof expected) != 0) {
    failure_ = mismatch(node_.rank(position), theirs, mesh_.rank(), expected);
  }
}

bool ShmCollective::has_table() const {
  return call_.kind == Kind::all_to_all || call_.kind == Kind::scatter || call_.kind == Kind::reduce_scatter;
}

std::uint32_t ShmCollective::rounds_for(const Buffer& given) const {
  std::size_t post_bytes = given.bytes;
  std::size_t widest = given.bytes;
  if (has_table()) {
    post_bytes = table_bytes();
    widest = 0;
    for (const Buffer& input : call_.inputs) {
      post_bytes += round_up(input.bytes, kLine);
      widest = std::max(widest, input.bytes);
    }
  }
  const std::size_t round_bytes = has_table() ? part_bytes_ : Node::kSlotBytes;
  return post_bytes > Node::kPostBytes ? static_cast<std::uint32_t>((widest + round_bytes - 1) / round_bytes) : 0;
}

std::byte* ShmCollective::write_table(std::byte* data) const {
  for (std::size_t i = 0; i < call_.inputs.size(); ++i) {
    const std::uint64_t bytes = call_.inputs[i].bytes;
    std::memcpy(data + i * sizeof bytes, &bytes, sizeof bytes);
  }
  return data + table_bytes();
}

void ShmCollective::write_inputs(std::byte* data) const {
  for (const Buffer& input : call_.inputs) {
    if (input.bytes > 0) std::memcpy(data, input.data, input.bytes);
    data += round_up(input.bytes, kLine);
  }
}

void ShmCollective::refer(std::byte* data, std::span<const Buffer> buffers, Stream stream) {
  for (const Buffer& buffer : buffers) {
    Reference reference;
    if (buffer.bytes > 0) {
      const auto region = transport::ShmRegistry::instance().find(buffer.data, buffer.bytes);
      if (region == nullptr) return;
      for (int reader = 0; reader < size_; ++reader) {
        if (reader != self_ && reads(stream, reader) && !node_.fd_exchange().offer(reader, *region)) return;
      }
      reference = {region->id, static_cast<std::uint64_t>(buffer.data - region->address)};
    }
    std::memcpy(data, &reference, sizeof reference);
    data += sizeof reference;
  }
  own_.refers = Refers::to_regions;
}

void ShmCollective::refer_by_address(std::byte* data, std::span<const Buffer> buffers) {
  for (const Buffer& buffer : buffers) {
    const Reference reference{0, reinterpret_cast<std::uint64_t>(buffer.data)};
    std::memcpy(data, &reference, sizeof reference);
    data += sizeof reference;
  }
  own_.refers = Refers::to_addresses;
}

ShmCollective::Reference ShmCollective::reference(int position, std::size_t number) const {
  Reference reference;
  std::memcpy(&reference, post_data(position) + table_bytes() + number * sizeof reference, sizeof reference);
  return reference;
}

std::byte* ShmCollective::referred(int position, std::size_t number, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const Reference at = reference(position, number);
  std::byte* mapped = node_.fd_exchange().mapped(position, at.region, at.offset, bytes);
  if (mapped == nullptr) {
    failure_ = {Failure::Kind::system, mesh_.rank(),
                "rank " + std::to_string(mesh_.rank()) + " cannot map " + std::to_string(bytes) + " bytes that rank " +
                    std::to_string(node_.rank(position)) +
                    " shares; is this process at its limit of mappings or of memory?"};
  }
  return mapped;
}

bool ShmCollective::begin_use(int position) {
  if (node_.begin_use(position)) return true;
  read_failure(position);
  return false;
}

bool ShmCollective::begin_use_of_all() {
  const int left = node_.begin_use_of_all();
  if (left >= 0) read_failure(left);
  return left < 0;
}

void ShmCollective::ask_for_slots(Stream stream, int position) {
  node_.publish(node_.asked(stream, self_, position), number_);
}

bool ShmCollective::is_asked_for_slots(Stream stream, int position) const {
  return node_.asked(stream, position, self_).load(std::memory_order_acquire) == number_;
}

void ShmCollective::tell_access(bool can) { node_.publish(node_.access(self_), tag(can ? 1 : 2)); }

bool ShmCollective::told_access(int position) const {
  return node_.access(position).load(std::memory_order_acquire) > tag(0);
}

std::optional<bool> ShmCollective::access_of_all() const {
  bool can = true;
  for (int position = 0; position < size_; ++position) {
    if (!told_access(position)) return {};
    can &= node_.access(position).load(std::memory_order_acquire) == tag(1);
  }
  return can;
}

std::uint32_t ShmCollective::published(Stream stream, int position) const {
  const std::uint64_t newest = node_.published(stream, position).load(std::memory_order_acquire);
  return newest <= tag(0) ? 0 : static_cast<std::uint32_t>(newest - tag(0));
}

bool ShmCollective::slot_is_free(Stream stream, std::uint32_t round) const {
  for (int position = 0; position < size_; ++position) {
    if (position == self_) continue;
    if (round < Node::kSlots) {
      // Readers of an earlier call must have finished that call.
      if (node_.segment(position).done.load(std::memory_order_acquire) < node_.last_stream_call()) return false;
      continue;
    }
    const std::uint32_t needed = round + 1 - static_cast<std::uint32_t>(Node::kSlots);
    if (reads(stream, position) && !has_taken(stream, position, needed)) return false;
  }
  return true;
}

std::byte* ShmCollective::slot(Stream stream, int position, std::uint32_t round) const {
  return node_.slot(stream, position, round);
}

void ShmCollective::publish(Stream stream, std::uint32_t rounds) {
  node_.publish(node_.published(stream, self_), tag(rounds));
}

void ShmCollective::take(Stream stream, int position, std::uint32_t rounds) {
  node_.taken(stream, self_, position).store(tag(rounds), std::memory_order_release);
}

bool ShmCollective::has_taken(Stream stream, int reader, std::uint32_t rounds) const {
  return node_.taken(stream, reader, self_).load(std::memory_order_acquire) >= tag(rounds);
}

bool ShmCollective::is_awaited(int position) const {
  if (position == self_) return false;
  if (!posted_) return node_.segment(position).done.load(std::memory_order_acquire) + Node::kPosts < number_;
  if (!all_posts_read_) return needs_post(position) && !read_[index(position)];
  return waits_for(position);
}

std::vector<int> ShmCollective::awaited() const {
  std::vector<int> ranks;
  for (int position = 0; position < size_; ++position) {
    if (is_awaited(position)) ranks.push_back(node_.rank(position));
  }
  return ranks;
}

bool ShmCollective::awaited_may_wait() const {
  if (all_posts_read_) return true;
  // A rank that is still in an earlier call may wait there for a rank at fault.
  for (int position = 0; position < size_; ++position) {
    if (!is_awaited(position)) continue;
    const Node::Segment& segment = node_.segment(position);
    for (const Node::Post& post : segment.posts) {
      if (post.call.load(std::memory_order_acquire) > segment.done.load(std::memory_order_acquire)) return true;
    }
  }
  return false;
}

void ShmCollective::wait_for(WaitSet& set) const {
  for (const int rank : awaited()) mesh_.wait_for(rank, POLLRDHUP, set.fds);
  for (int i = 1; i < size_; ++i) {
    const int position = (self_ - i + size_) % size_;
    if (!is_awaited(position)) continue;
    node_.await(position);
    // All awaited posts must come, in any order. With one post after the other, this rank wakes about log P times; with
    // all at once, up to P times.
    if (!all_posts_read_) break;
  }
  wait_for_check(set);
}

void ShmCollective::wait_for_check(WaitSet& set) const {
  // The doorbell that woke this rank may have announced a failure, and will not ring again.
  if (check_due_) set.wake_at(next_check_ns_);
  set.wake_at(look_ns_);
}

void ShmCollective::find_lost() {
  const int first = looked_at_;
  if (looks_ && looked_at_ < size_) looked_at_ += kLooks;
  for (int position = 0; position < size_ && !failure_; ++position) {
    if (position == self_) continue;
    const auto left = node_.segment(position).left.load(std::memory_order_acquire);
    // A rank counts as lost only at the second check, so that a poll in between reads what it wrote before it left.
    bool is_gone = false;
    if (is_awaited(position)) {
      const int behind = (position - self_ - 1 + size_) % size_;
      const bool is_next = first >= size_ || (behind >= first && behind < first + kLooks);
      const bool looks = (looks_ && is_next) || leaving_[index(position)];
      const int rank = node_.rank(position);
      is_gone = left == Node::kLeft || (mesh_.was_connected(rank) ? mesh_.hung_up(rank) : looks && has_ended(position));
    }
    const bool is_lost = is_gone && leaving_[index(position)];
    leaving_[index(position)] = is_gone;
    if (left == Node::kFailed || (left == Node::kLeft && is_lost)) {
      // After a failure no rank goes on, whichever rank this one waits for.
      read_failure(position);
    } else if (is_lost) {
      lose(position);
    }
  }
}

bool ShmCollective::has_ended(int position) {
  if (const auto ended = node_.has_ended(position)) return *ended;
  return mesh_.hung_up(node_.rank(position));  // connects to that rank
}

void ShmCollective::read_failure(int position) {
  const Node::Segment& segment = node_.segment(position);
  failure_ = remote_abort(node_.rank(position), segment.fault_rank, std::string(segment.reason, segment.reason_bytes),
                          {segment.expired_call, segment.expired_timeout_ns}, mesh_.rank(), own_.header);
}

void ShmCollective::lose(int position) {
  const int rank = node_.rank(position);
  failure_ = read_last_abort(mesh_, rank, call_, peer_lost(rank, {}, own_.header));
}

}  // namespace netfold::collective
