#include "recovery.hpp"

#include <netfold/collective/switch_path.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "settings.hpp"

namespace netfold::nccl {

using collective::Call;
using collective::Failure;
using collective::Kind;
using collective::SwitchPath;
using engine::Engine;
using transport::now_ns;

// The one thread of a process that looks at all switches, and that messages wake.
class Watcher {
 public:
  // Lives as long as the process.
  static Watcher& instance() {
    static Watcher* const watcher = new Watcher;
    return *watcher;
  }
  void add(std::shared_ptr<Recovery> recovery) {
    const std::lock_guard lock(mutex_);
    all_.insert(std::move(recovery));
  }
  void remove(const std::shared_ptr<Recovery>& recovery) {
    const std::lock_guard lock(mutex_);
    all_.erase(recovery);
  }

 private:
  Watcher() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::int64_t looked_ns = 0;
    for (;;) {
      try {
        run_once(looked_ns);
      } catch (const std::exception&) {  // memory is short: the next look may find more
        std::this_thread::sleep_for(std::chrono::nanoseconds(Recovery::kTickNs));
      }
    }
  }

  void run_once(std::int64_t& looked_ns) {
    const auto done = Engine::instance().completions.pop(Recovery::kTickNs);
    std::set<std::shared_ptr<Recovery>> all;
    {
      const std::lock_guard lock(mutex_);
      all = all_;
    }
    const std::int64_t now = now_ns();
    const bool is_due = now >= looked_ns + Recovery::kTickNs;
    if (is_due) looked_ns = now;
    for (const auto& each : all) {
      try {
        if (done) each->operation_done(*done);
        if (is_due) each->look(now);
      } catch (const std::exception& error) {
        each->fail(error.what());
      }
    }
  }

  std::mutex mutex_;
  std::set<std::shared_ptr<Recovery>> all_;
};

namespace {

std::vector<std::byte> packed(const std::vector<bool>& bits) {
  std::vector<std::byte> bytes((bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[i / 8] |= std::byte{1} << (i % 8);
  }
  return bytes;
}

std::vector<bool> unpacked(std::span<const std::byte> bytes) {
  std::vector<bool> bits(bytes.size() * 8);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = (bytes[i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
  return bits;
}

bool any(const std::vector<bool>& bits) { return std::ranges::find(bits, true) != bits.end(); }

}  // namespace

Recovery::Recovery(std::shared_ptr<engine::Group> group, std::unique_ptr<control::Membership> membership,
                   std::uint64_t generation)
    : group_(std::move(group)),
      membership_(std::move(membership)),
      generation_(generation),
      window_(membership_->window()) {}

void Recovery::start() {
  Watcher::instance().add(shared_from_this());
  const std::lock_guard lock(mutex_);
  for (int peer = is_first() ? 1 : 0; peer < (is_first() ? group_->size() : 1); ++peer) post_receive(peer);
}

bool Recovery::has_switch() {
  const std::lock_guard lock(mutex_);
  return state_ == State::watching;
}

void Recovery::await_all() {
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  if (is_first()) {
    note_closing();
  } else {
    send(0, {.type = Type::closing});
  }
  closed_.wait_until(lock, now_ns() + kCloseNs, [this] { return is_closed_; });
}

void Recovery::leave() {
  Watcher::instance().remove(shared_from_this());
  membership_->leave("the communicator was closed");
  Engine::instance().remove_group(group_);
}

// --- messages --------------------------------------------------------------------------------------------------------

void Recovery::post_receive(int peer) {
  Receive receive{peer, std::vector<std::byte>(sizeof(Header) + kMessageBytes), {}};
  Call call;
  call.kind = Kind::receive;
  call.root = peer;
  call.accepts_less = call.is_internal = true;
  call.outputs.push_back({receive.bytes.data(), receive.bytes.size()});
  receive.operation = group_->submit(call, -1, false);
  const std::uint64_t id = receive.operation->id();
  const bool is_done = !receive.operation->notify();
  receives_.emplace(id, std::move(receive));
  // As if the notification came.
  if (is_done) Engine::instance().completions.push(id);
}

void Recovery::send(int peer, Header header, std::span<const std::byte> bytes) {
  header.bytes = static_cast<std::uint32_t>(bytes.size());
  Sent sent{std::vector<std::byte>(sizeof header + bytes.size()), {}};
  std::memcpy(sent.bytes.data(), &header, sizeof header);
  if (!bytes.empty()) std::memcpy(sent.bytes.data() + sizeof header, bytes.data(), bytes.size());
  Call call;
  call.kind = Kind::send;
  call.root = peer;
  call.is_internal = true;
  call.inputs.push_back({sent.bytes.data(), sent.bytes.size()});
  std::erase_if(sends_, [](const Sent& each) { return each.operation->done(); });
  sent.operation = group_->submit(call, -1, false);
  sends_.push_back(std::move(sent));
}

void Recovery::send_packets(int peer, const Packets& packets) {
  std::vector<std::byte> batch;
  for (std::size_t i = 0; i < packets.size(); ++i) {
    const auto size = static_cast<std::uint32_t>(packets[i].size());
    const auto raw = std::as_bytes(std::span(&size, 1));
    batch.insert(batch.end(), raw.begin(), raw.end());
    batch.insert(batch.end(), packets[i].begin(), packets[i].end());
    const bool is_last = i + 1 == packets.size();
    if (!is_last && batch.size() + sizeof size + packets[i + 1].size() <= kMessageBytes) continue;
    send(peer, {.type = Type::results, .is_last = is_last}, batch);
    batch.clear();
  }
}

void Recovery::operation_done(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = receives_.find(id);
  if (found == receives_.end()) return;
  const Receive receive = std::move(found->second);
  receives_.erase(found);
  if (receive.operation->failure()) {  // the group has failed, as its operations tell
    is_closed_ = true;
    closed_.notify_all();
    return;
  }
  Header header;
  std::memcpy(&header, receive.bytes.data(), sizeof header);
  if (header.bytes > kMessageBytes)
    throw std::runtime_error("rank " + std::to_string(receive.peer) + " sent a wrong size");
  post_receive(receive.peer);
  handle(receive.peer, header, std::span(receive.bytes).subspan(sizeof header, header.bytes));
}

void Recovery::handle(int peer, const Header& header, std::span<const std::byte> bytes) {
  const auto text = [&] { return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()); };
  switch (header.type) {
    case Type::lost:
      begin(text());
      break;
    case Type::freeze: {
      if (state_ != State::watching && state_ != State::freezing) break;
      state_ = State::freezing;
      why_ = text();
      deadline_ns_ = now_ns() + kRecoverNs;
      const Held held = freeze();
      send(0, {.type = Type::frozen, .base = held.base, .end = held.end, .promised = promised_}, packed(held.chunks));
      break;
    }
    case Type::frozen:
      if (state_ != State::freezing) break;
      held_[peer] = {header.base, header.end, unpacked(bytes)};
      if (held_.size() == static_cast<std::size_t>(group_->size())) plan();
      break;
    case Type::give:
      send_packets(0, kept(header.base, unpacked(bytes)));
      break;
    case Type::results: {
      Packets& packets = results_[peer];
      while (!bytes.empty()) {
        std::uint32_t size = 0;
        if (bytes.size() < sizeof size)
          throw std::runtime_error("rank " + std::to_string(peer) + " sent half a result");
        std::memcpy(&size, bytes.data(), sizeof size);
        bytes = bytes.subspan(sizeof size);
        if (bytes.size() < size) throw std::runtime_error("rank " + std::to_string(peer) + " sent half a result");
        packets.emplace_back(bytes.begin(), bytes.begin() + size);
        bytes = bytes.subspan(size);
      }
      if (header.is_last == 0 || !is_first()) break;
      std::erase(giving_, peer);
      if (state_ == State::gathering && giving_.empty()) distribute();
      break;
    }
    case Type::go:
      if (state_ == State::freezing && !is_first()) {
        go_on(header.base, header.end, header.promised != 0, unpacked(bytes));
      }
      break;
    case Type::closing:
      note_closing();
      break;
    case Type::closed:
      is_closed_ = true;
      closed_.notify_all();
      break;
  }
}

void Recovery::note_closing() {
  if (++closing_ < group_->size()) return;
  for (int peer = 1; peer < group_->size(); ++peer) send(peer, {.type = Type::closed});
  is_closed_ = true;
  closed_.notify_all();
}

// --- the loss of the switch ------------------------------------------------------------------------------------------

void Recovery::look(std::int64_t now) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::watching) {
    std::optional<control::Membership::Event> event;
    group_->on_switch_path(0, [&](SwitchPath& path) { event = membership_->poll(now, path.channel()); });
    // A rank that left the switch may be well: then it can be asked for its results. If it is gone, so is the group.
    if (event && !is_closing_) begin(event->reason);
    return;
  }
  if (state_ == State::down || now < deadline_ns_) return;
  std::string silent;
  for (int rank = 1; is_first() && rank < group_->size(); ++rank) {
    if (state_ == State::freezing ? !held_.contains(rank) : std::ranges::find(giving_, rank) != giving_.end()) {
      silent += (silent.empty() ? "rank " : ", ") + std::to_string(rank);
    }
  }
  if (silent.empty()) silent = "rank 0";
  throw std::runtime_error(why_ + ", and " + silent + " did not say within " +
                           std::to_string(kRecoverNs / 1'000'000'000) +
                           " s which results it has: is its process stopped?");
}

void Recovery::begin(const std::string& why) {
  if (state_ != State::watching) return;
  why_ = why;
  const auto text = std::as_bytes(std::span(why));
  deadline_ns_ = now_ns() + kRecoverNs;
  state_ = State::freezing;
  if (!is_first()) return send(0, {.type = Type::lost}, text);
  for (int peer = 1; peer < group_->size(); ++peer) send(peer, {.type = Type::freeze}, text);
  held_[0] = freeze();
  if (group_->size() == 1) plan();
}

Recovery::Held Recovery::freeze() {
  std::optional<SwitchPath::FrozenState> frozen;
  group_->on_switch_path(0, [&](SwitchPath& path) { frozen = path.freeze(generation_); });
  if (!frozen) throw std::runtime_error("the communicator has ended");
  promised_ = frozen->promised;
  return {frozen->channel.base, frozen->channel.end, unpacked(frozen->channel.held)};
}

// At rank 0: all ranks are frozen.
void Recovery::plan() {
  base_ = std::ranges::min_element(held_, {}, [](const auto& each) { return each.second.base; })->second.base;
  end_ = std::ranges::min_element(held_, {}, [](const auto& each) { return each.second.end; })->second.end;
  std::map<int, Bits> wanted;  // by the rank that shall give
  all_.assign(window_, false);
  for (std::uint32_t i = 0; i < window_; ++i) {
    const auto has = [&](const auto& each) { return each.second.has(base_ + i); };
    const auto source = std::ranges::find_if(held_, has);
    if (source == held_.end()) continue;
    if (base_ + i >= end_) throw std::runtime_error("a rank has a result to which another rank has not contributed");
    all_[i] = true;
    if (source->first == 0) continue;
    wanted.try_emplace(source->first, Bits(window_)).first->second[i] = true;
  }
  state_ = State::gathering;
  for (const auto& [rank, chunks] : wanted) {
    giving_.push_back(rank);
    send(rank, {.type = Type::give, .base = base_}, packed(chunks));
  }
  if (giving_.empty()) distribute();
}

// At rank 0, once it can get every result that any rank has.
void Recovery::distribute() {
  for (const auto& [rank, packets] : results_) {
    if (!accept(packets))
      throw std::runtime_error("rank " + std::to_string(rank) + " kept a result that fails its checks");
  }
  std::size_t passed_on = 0;
  for (int rank = 1; rank < group_->size(); ++rank) {
    Bits lacking(window_);
    for (std::uint32_t i = 0; i < window_; ++i) lacking[i] = all_[i] && !held_[rank].has(base_ + i);
    if (any(lacking)) {
      const Packets packets = kept(base_, lacking);
      passed_on += packets.size();
      send_packets(rank, packets);
    }
    send(rank, {.type = Type::go, .base = base_, .end = end_, .promised = promised_}, packed(all_));
  }
  inform("rank 0 passed on " + std::to_string(passed_on) + " results of the lost switch");
  results_.clear();
  go_on(base_, end_, promised_, all_);
}

void Recovery::go_on(std::uint64_t base, std::uint64_t end, bool promised, const Bits& wanted) {
  if (const auto packets = results_.find(0); packets != results_.end() && !accept(packets->second)) {
    throw std::runtime_error("rank 0 passed on a result that fails its checks");
  }
  results_.clear();
  const Held held = freeze();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] && !held.has(base + i))
      throw std::runtime_error("a result of the lost switch did not reach this rank");
  }
  group_->on_switch_path(0, [&](SwitchPath& path) { path.fall_back(generation_, end, promised); });
  state_ = State::down;
  warn(why_ + "; no operation is lost, and CollNet goes on without a switch, more slowly, until NCCL makes its " +
       "communicators anew");
  membership_->leave("the communicator goes on without the switch");
}

bool Recovery::accept(const Packets& packets) {
  const std::vector<std::span<const std::byte>> views(packets.begin(), packets.end());
  bool is_accepted = false;
  group_->on_switch_path(0, [&](SwitchPath& path) { is_accepted = path.accept(generation_, views, now_ns()); });
  return is_accepted;
}

Recovery::Packets Recovery::kept(std::uint64_t base, const Bits& chunks) {
  std::vector<std::uint64_t> numbers;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i]) numbers.push_back(base + i);
  }
  std::optional<Packets> packets;
  group_->on_switch_path(0, [&](SwitchPath& path) { packets = path.kept(generation_, numbers); });
  if (!packets) throw std::runtime_error("a result of the lost switch is not kept any more");
  return *packets;
}

void Recovery::fail(const std::string& why) {
  group_->fail({Failure::Kind::switch_lost, group_->rank(), why});
  const std::lock_guard lock(mutex_);
  state_ = State::down;
}

}  // namespace netfold::nccl
