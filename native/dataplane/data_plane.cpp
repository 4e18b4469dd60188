#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#include <netfold/dataplane/data_plane.hpp>

#include <algorithm>
#include <array>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <system_error>

namespace netfold::dataplane {

using protocol::Drop;
using protocol::SwitchJob;

namespace {

constexpr std::uint32_t kWakeId = 0xffffffff;  // job ids stay below it
constexpr std::uint64_t kPollTimerId = std::uint64_t{1} << 33;
// Between two times that all workers are told of a call that does not match.
constexpr std::int64_t kMismatchNs = 10'000'000;
constexpr std::size_t kPieces = 2;  // of a packet: what the machine wrote, and its tag
// With a job's id: an event of its socket to the parent.
constexpr std::uint64_t kParentBit = std::uint64_t{1} << 32;

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Whether a packet that is long enough for a header ends with its tag.
bool authentic(auth::PacketAuthenticator& authenticator, std::span<const std::byte> bytes) {
  return bytes.size() >= protocol::kHeaderBytes + auth::kMacBytes &&
         authenticator.verify(protocol::nonce_of(bytes.data(), bytes.size() - auth::kMacBytes), bytes);
}

void tag(auth::PacketAuthenticator& authenticator, std::span<const std::byte> packet, std::byte* out) {
  const iovec piece{const_cast<std::byte*>(packet.data()), packet.size()};
  authenticator.mac(protocol::nonce_of(packet.data(), packet.size()), {&piece, 1}, out);
}

// The packet without its tag, decrypted into `plain` where the authenticator encrypts; empty where the tag is wrong.
std::span<const std::byte> opened(auth::PacketAuthenticator& authenticator, std::span<const std::byte> bytes,
                                  std::vector<std::byte>& plain) {
  if (!authenticator.encrypts()) {
    return authentic(authenticator, bytes) ? bytes.first(bytes.size() - auth::kMacBytes) : std::span<const std::byte>();
  }
  if (bytes.size() != plain.size() + auth::kMacBytes) return {};
  return authenticator.decrypt(protocol::nonce_of(bytes.data(), plain.size()), bytes, protocol::kHeaderBytes,
                               plain.data())
             ? std::span<const std::byte>(plain)
             : std::span<const std::byte>();
}

// Returns the bytes to send before the tag: `packet` as it is, or its encrypted form, which stands at `encrypted`.
const std::byte* sealed(auth::PacketAuthenticator& authenticator, std::span<const std::byte> packet,
                        std::byte* encrypted, std::byte* out) {
  if (!authenticator.encrypts()) {
    tag(authenticator, packet, out);
    return packet.data();
  }
  const auto header = packet.first(protocol::kHeaderBytes);
  const auto values = packet.subspan(protocol::kHeaderBytes);
  const iovec piece{const_cast<std::byte*>(values.data()), values.size()};
  if (encrypted != packet.data()) std::copy(header.begin(), header.end(), encrypted);
  authenticator.encrypt(protocol::nonce_of(packet.data(), packet.size()), header, {&piece, 1},
                        encrypted + protocol::kHeaderBytes, out);
  return encrypted;
}

// As long as it lives the calling thread stays on a core, so that memory it touches first is near that; -1: anywhere.
class OnCore {
 public:
  explicit OnCore(int core) : moved_(core >= 0) {
    if (!moved_) return;
    pthread_getaffinity_np(pthread_self(), sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(core), &one);
    if (const int error = pthread_setaffinity_np(pthread_self(), sizeof one, &one); error != 0) {
      throw std::invalid_argument("core " + std::to_string(core) +
                                  " cannot be used here: " + std::generic_category().message(error));
    }
  }
  ~OnCore() {
    if (moved_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
  }
  OnCore(const OnCore&) = delete;
  OnCore& operator=(const OnCore&) = delete;

 private:
  bool moved_;
  cpu_set_t before_{};
};

}  // namespace

DataPlane::DataPlane(const Options& options)
    : options_(options),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      poll_timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
  if (!epoll_ || !wake_ || !poll_timer_) transport::throw_errno("aggregator: epoll");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeId}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  event.data.u64 = kPollTimerId;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, poll_timer_.get(), &event);
  if (options.core >= CPU_SETSIZE) throw std::invalid_argument("there is no core " + std::to_string(options.core));
  // The thread begins where its maker is, and stays.
  const OnCore maker(options.core);
  thread_ = std::thread([this] { run(); });
}

DataPlane::~DataPlane() {
  stopping_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  thread_.join();
}

void DataPlane::on_thread(const std::function<void()>& command) {
  std::mutex done_mutex;
  std::condition_variable done_condition;
  bool done = false;
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    commands_.emplace_back([&] {
      try {
        command();
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard done_lock(done_mutex);
      done = true;
      done_condition.notify_one();
    });
    has_commands_.store(true, std::memory_order_relaxed);
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  std::unique_lock lock(done_mutex);
  done_condition.wait(lock, [&] { return done; });
  if (error) std::rethrow_exception(error);
}

std::unique_ptr<DataPlane::Job> DataPlane::make_job(std::uint32_t id, std::uint32_t incarnation,
                                                    const std::vector<std::uint64_t>& nonces,
                                                    const std::vector<auth::Key>& hello_keys) {
  if (!hello_keys.empty() && hello_keys.size() != nonces.size()) throw std::invalid_argument("open: a key a worker");
  auto job = std::make_unique<Job>();
  job->id = id;
  job->incarnation = incarnation;
  job->authenticated = !hello_keys.empty();
  for (std::size_t i = 0; i < nonces.size(); ++i) {
    Worker& worker = job->workers.emplace_back();
    worker.nonce = nonces[i];
    if (job->authenticated) worker.hello_authenticator.emplace(hello_keys[i]);
  }
  job->counters.last_arrivals.resize(nonces.size());
  job->counters.arrivals.resize(nonces.size());
  job->counters.arrival_lag_ns.resize(nonces.size());
  return job;
}

void DataPlane::add(std::unique_ptr<Job> job) {
  on_thread([&] {
    watch(job->id, *job->port);
    const std::uint32_t id = job->id;
    jobs_[id] = std::move(job);
  });
}

std::uint16_t DataPlane::open(std::uint32_t job_id, std::uint32_t incarnation, const std::string& host,
                              const std::vector<std::uint64_t>& nonces, const std::vector<auth::Key>& hello_keys,
                              std::size_t buffer_bytes) {
  auto job = make_job(job_id, incarnation, nonces, hello_keys);
  auto socket = std::make_unique<transport::UdpSocket>(transport::Address::parse(host, 0), buffer_bytes);
  job->socket = socket.get();
  job->port = std::move(socket);
  const std::uint16_t port = job->socket->local().port();
  add(std::move(job));
  return port;
}

DataPlane::FabricAddress DataPlane::open_on_fabric(std::uint32_t job_id, std::uint32_t incarnation,
                                                   std::unique_ptr<transport::fabric::Endpoint> fabric_endpoint,
                                                   const std::vector<std::uint64_t>& nonces,
                                                   const std::vector<std::uint64_t>& proofs,
                                                   const std::vector<auth::Key>& hello_keys, std::size_t packet_bytes,
                                                   std::size_t in_flight_bytes) {
  auto job = make_job(job_id, incarnation, nonces, hello_keys);
  auto endpoint = std::make_unique<transport::fabric::FabricDatagrams>(std::move(fabric_endpoint), packet_bytes,
                                                                       in_flight_bytes, nonces.size());
  FabricAddress address{.name = endpoint->name(),
                        .tags = {},
                        .packet_bytes = endpoint->packet_bytes(),
                        .buffer_bytes = endpoint->buffer_bytes()};
  for (std::size_t i = 0; i < nonces.size(); ++i) {
    if (proofs.at(i) == nonces[i]) throw std::invalid_argument("open: a proof is another number than the nonce");
    address.tags.push_back(endpoint->tag(static_cast<transport::Datagrams::Peer>(i)));
  }
  job->proofs = proofs;
  job->endpoint = endpoint.get();
  job->port = std::move(endpoint);
  add(std::move(job));
  return address;
}

void DataPlane::set_worker_address(std::uint32_t job_id, std::uint16_t worker, const std::string& host,
                                   std::uint16_t port, const std::string& local) {
  const transport::Address address = transport::Address::parse(host, port);
  std::optional<transport::Address> source;
  if (!local.empty()) source = transport::Address::parse(local, 0);
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found == jobs_.end()) return;
    if (found->second->socket == nullptr) throw std::invalid_argument("set_worker_address: the job is on a fabric");
    found->second->workers.at(worker).expected = found->second->socket->add(address, source);
  });
}

void DataPlane::set_worker_fabric_address(std::uint32_t job_id, std::uint16_t worker,
                                          const std::vector<std::byte>& name, std::uint64_t tag) {
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found == jobs_.end()) return;
    if (found->second->endpoint == nullptr)
      throw std::invalid_argument("set_worker_fabric_address: the job is on no fabric");
    Worker& expected = found->second->workers.at(worker);
    found->second->endpoint->connect(worker, name, tag);
    expected.expected = worker;
  });
}

std::size_t DataPlane::receive_buffer_bytes(std::uint32_t job_id) {
  std::size_t bytes = 0;
  on_thread([&] {
    if (const auto found = jobs_.find(job_id); found != jobs_.end())
      bytes = found->second->port->receive_buffer_bytes();
  });
  return bytes;
}

void DataPlane::connect_parent(std::uint32_t job_id, std::unique_ptr<transport::Datagrams> port,
                               transport::Datagrams::Peer to) {
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found == jobs_.end()) throw std::invalid_argument("connect_parent: no such job");
    watch(kParentBit | job_id, *port);
    found->second->parent.emplace();
    found->second->parent->port = std::move(port);
    found->second->parent->peer = to;
  });
}

void DataPlane::begin(const protocol::JobConfig& config, const std::optional<JobKeys>& keys,
                      const std::optional<ParentKeys>& parent_keys, auth::Security security) {
  // Slots are allocated here, not between two batches of other jobs.
  const OnCore near(options_.core);
  auto machine = std::make_unique<SwitchJob>(config);
  std::vector<First> firsts(machine->slot_count());
  std::vector<std::uint32_t> results(machine->slot_count());
  std::vector<std::optional<auth::PacketAuthenticator>> authenticators(config.workers);
  std::optional<auth::PacketAuthenticator> result_authenticator;
  std::optional<auth::PacketAuthenticator> sum_authenticator;
  std::optional<auth::PacketAuthenticator> parent_authenticator;
  std::vector<std::byte> tags;
  const std::size_t packet_bytes = machine->packet_bytes();
  std::vector<std::byte> encrypted;
  std::vector<std::byte> plain;
  std::vector<std::byte> encrypted_sums;
  if (parent_keys) {
    sum_authenticator.emplace(parent_keys->sums, security);
    parent_authenticator.emplace(parent_keys->results, security);
    if (sum_authenticator->encrypts()) encrypted_sums.resize(transport::UdpSocket::kMaxSegments * packet_bytes);
  }
  if (keys) {
    for (std::size_t i = 0; i < authenticators.size(); ++i)
      authenticators[i].emplace(keys->contributions.at(i), security);
    result_authenticator.emplace(keys->results, security);
    tags.resize(machine->slot_count() * auth::kMacBytes);
    if (result_authenticator->encrypts()) encrypted.resize(machine->slot_count() * packet_bytes);
  }
  if (!encrypted.empty() || !encrypted_sums.empty()) plain.resize(packet_bytes);
  on_thread([&] {
    const auto found = jobs_.find(config.job);
    if (found == jobs_.end()) throw std::invalid_argument("begin: no such job");
    Job& job = *found->second;
    if (job.authenticated != keys.has_value()) throw std::invalid_argument("begin: keys are for a job that has them");
    if (job.workers.size() != authenticators.size())
      throw std::invalid_argument("begin: not as many workers as were opened");
    std::string silent;
    for (std::size_t i = 0; i < job.workers.size(); ++i) {
      if (!job.workers[i].address) silent += " " + std::to_string(i);
    }
    if (!silent.empty()) throw std::invalid_argument("begin: no hello came from worker" + silent);
    if (machine->config().parent.has_value() != job.parent.has_value()) {
      throw std::invalid_argument("begin: a job has a parent in its config and a port to it, or neither");
    }
    if (job.parent) {
      job.parent->machine = protocol::ParentSender(machine->slot_count());
      job.parent->authenticator = std::move(sum_authenticator);
      job.parent->result_authenticator = std::move(parent_authenticator);
      job.parent->encrypted = std::move(encrypted_sums);
    }
    job.machine = std::move(machine);
    job.firsts = std::move(firsts);
    job.results = std::move(results);
    for (std::size_t i = 0; i < job.workers.size(); ++i) job.workers[i].authenticator = std::move(authenticators[i]);
    job.result_authenticator = std::move(result_authenticator);
    job.tags = std::move(tags);
    job.encrypted = std::move(encrypted);
    job.plain = std::move(plain);
  });
}

void DataPlane::close(std::uint32_t job_id) {
  std::unique_ptr<Job> ended;  // freed here, not on the data path
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found == jobs_.end()) return;
    ended = std::move(found->second);
    jobs_.erase(found);
    forget(job_id, *ended->port);
    if (ended->parent) forget(kParentBit | job_id, *ended->parent->port);
  });
}

JobCounters DataPlane::counters_of(const Job& job) {
  JobCounters counters = job.counters;
  const auto& of_port = job.port->counters();
  counters.receive_calls = of_port.receive_calls;
  counters.received_datagrams = of_port.received_datagrams;
  counters.send_errors += of_port.send_errors;
  if (!of_port.last_send_error.empty()) counters.last_send_error = of_port.last_send_error;
  if (const auto* machine = job.machine.get()) {
    counters.slots = machine->slot_count();
    counters.slots_collecting = machine->collecting_count();
    counters.slots_summed = machine->config().parent ? machine->summed_count() : 0;
  }
  if (job.parent) {
    counters.sums_sent = job.parent->machine.packets_sent();
    counters.sums_resent = job.parent->machine.sent_again();
  }
  return counters;
}

std::optional<JobCounters> DataPlane::counters(std::uint32_t job_id) {
  std::optional<JobCounters> counters;
  on_thread([&] {
    if (const auto found = jobs_.find(job_id); found != jobs_.end()) counters = counters_of(*found->second);
  });
  return counters;
}

DataPlane::Reading DataPlane::read() {
  Reading reading;
  on_thread([&] {
    timespec used{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    reading.cpu_ns = static_cast<std::int64_t>(used.tv_sec) * 1'000'000'000 + used.tv_nsec;
    for (const auto& [id, job] : jobs_) reading.jobs.emplace(id, counters_of(*job));
  });
  return reading;
}

std::vector<std::uint16_t> DataPlane::missing(std::uint32_t job_id, std::uint64_t chunk) {
  std::vector<std::uint16_t> workers;
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found != jobs_.end() && found->second->machine) workers = found->second->machine->missing(chunk);
  });
  return workers;
}

void DataPlane::run() {
  std::array<epoll_event, 64> events;
  std::int64_t busy_until_ns = 0;
  while (!stopping_) {
    const bool at_once = wait_hint() || (options_.busy_poll_ns > 0 && monotonic_ns() < busy_until_ns);
    const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), at_once ? 0 : -1);
    if (ready > 0 && options_.busy_poll_ns > 0) busy_until_ns = monotonic_ns() + options_.busy_poll_ns;
    bool looks = at_once;
    for (int i = 0; i < ready; ++i) {
      const std::uint64_t source = events[static_cast<std::size_t>(i)].data.u64;
      // Between two jobs, too: with many of them busy a command would else wait for a batch of each.
      if (has_commands_.load(std::memory_order_relaxed)) run_commands();
      if (source != kWakeId && source != kPollTimerId) {
        serve(source);
        continue;
      }
      std::uint64_t value = 0;
      [[maybe_unused]] const auto got =
          ::read(source == kPollTimerId ? poll_timer_.get() : wake_.get(), &value, sizeof value);
      looks |= source == kPollTimerId;
      // After the read: a command that came before it has no other event.
      if (source == kWakeId) run_commands();
    }
    if (!looks) continue;
    for (const std::uint64_t id : polled_ports_) serve(id);
  }
}

void DataPlane::run_commands() {
  for (;;) {
    std::function<void()> command;
    {
      std::lock_guard lock(mutex_);
      if (commands_.empty()) {
        has_commands_.store(false, std::memory_order_relaxed);
        return;
      }
      command = std::move(commands_.front());
      commands_.pop_front();
    }
    command();
  }
}

void DataPlane::serve(std::uint64_t id) {
  const auto found = jobs_.find(static_cast<std::uint32_t>(id));
  if (found == jobs_.end()) return;  // closed by a command of this very turn
  Job& job = *found->second;
  try {
    if (id & kParentBit) {
      receive_from_parent(job);
    } else {
      receive(job);
    }
    flush(job);
    flush_sums(job);
  } catch (const std::system_error& error) {
    // A provider failed. This job's workers see that no result comes, and go on without the switch; other jobs go on.
    ++job.counters.send_errors;
    job.counters.last_send_error = error.what();
    for (Worker& worker : job.workers) {
      worker.asked.clear();
      worker.sent = job.results_count;
    }
  }
}

void DataPlane::receive(Job& job) {
  job.port->receive([&](std::span<const transport::Datagrams::PacketTrain> batch) {
    const std::int64_t now_ns = monotonic_ns();
    // By worker, those of each in the order that they came in: floats that come in rank order are added at once
    // (switch_job.hpp). What came in one batch counts as simultaneous anyway.
    job.order.assign(batch.size(), 0);
    std::iota(job.order.begin(), job.order.end(), 0);
    std::stable_sort(job.order.begin(), job.order.end(), [&](std::uint16_t one, std::uint16_t other) {
      return protocol::worker_of(batch[one].bytes) < protocol::worker_of(batch[other].bytes);
    });
    for (const std::uint16_t place : job.order) {
      transport::for_each_packet(
          batch[place], [&](std::span<const std::byte> bytes) { take(job, bytes, batch[place].source, now_ns); });
    }
  });
}

void DataPlane::take(Job& job, std::span<const std::byte> bytes, transport::Datagrams::Peer source,
                     std::int64_t now_ns) {
  const auto count_drop = [&](Drop reason) { ++job.counters.drops[static_cast<std::size_t>(reason)]; };
  const auto view = protocol::PacketView::parse(bytes);
  if (!view) return count_drop(Drop::malformed);
  const protocol::Header header = view->header();
  if (header.flags & protocol::kHello) return hello(job, header, bytes, source);
  if (header.worker >= job.workers.size()) return count_drop(Drop::worker);
  Worker& from = job.workers[header.worker];
  if (!from.is_validated(source)) return count_drop(Drop::source);
  if (!job.machine) return count_drop(Drop::epoch);
  if (from.authenticator) {  // the header is never encrypted, and is covered by the tag
    bytes = opened(*from.authenticator, bytes, job.plain);
    if (bytes.empty()) return count_drop(Drop::unauthenticated);
  }

  const SwitchJob::Handled handled = job.machine->handle_packet(header, bytes);
  // A copy of what came before, or of what nobody needs any more, is as good a sign of life of the packets around it.
  if (handled.outcome != SwitchJob::Outcome::dropped || handled.drop == Drop::stale ||
      handled.drop == Drop::duplicate) {
    const auto gap = from.gap_detector.observe(header.packet_number);
    if (gap.count > 0) nack(job, header.worker, gap);
  }
  switch (handled.outcome) {
    case SwitchJob::Outcome::dropped:
      return count_drop(handled.drop);
    case SwitchJob::Outcome::stored:
      return arrived(job, handled, now_ns, false);
    case SwitchJob::Outcome::completed:
      arrived(job, handled, now_ns, true);
      return completed(job, handled.slot);
    case SwitchJob::Outcome::summed:
      arrived(job, handled, now_ns, true);
      return job.parent->machine.offer(handled.slot);
    case SwitchJob::Outcome::resend_sum:
      count_drop(Drop::duplicate);  // as far as this switch's own sum is concerned
      return job.parent->machine.offer(handled.slot);
    case SwitchJob::Outcome::nack:
      return;  // from a parent alone
    case SwitchJob::Outcome::resend_result:
      ++job.counters.results_resent;
      return queue(job, job.workers[handled.worker], handled.slot);
    case SwitchJob::Outcome::mismatch:
      return tell_mismatch(job, handled, protocol::CallDescriptor::of(header), now_ns);
  }
}

void DataPlane::completed(Job& job, std::uint32_t slot) {
  if (job.result_authenticator) {
    std::byte* const encrypted = job.encrypted.empty() ? nullptr : job.encrypted.data() + slot * job.plain.size();
    sealed(*job.result_authenticator, job.machine->frame(slot), encrypted, job.tags.data() + slot * auth::kMacBytes);
  }
  ++job.counters.results;
  job.counters.result_bytes += job.machine->descriptor(slot).value_bytes();
  job.results[job.results_count++ & (job.results.size() - 1)] = slot;
}

void DataPlane::receive_from_parent(Job& job) {
  job.parent->port->receive([&](std::span<const transport::Datagrams::PacketTrain> batch) {
    for (const auto& train : batch) {
      transport::for_each_packet(train,
                                 [&](std::span<const std::byte> bytes) { take_from_parent(job, bytes, train.source); });
    }
  });
}

void DataPlane::take_from_parent(Job& job, std::span<const std::byte> bytes, transport::Datagrams::Peer source) {
  const auto count_drop = [&](Drop reason) { ++job.counters.parent_drops[static_cast<std::size_t>(reason)]; };
  if (source != job.parent->peer) return count_drop(Drop::source);
  if (!job.machine) return count_drop(Drop::epoch);
  if (job.parent->result_authenticator) {
    bytes = opened(*job.parent->result_authenticator, bytes, job.plain);
    if (bytes.empty()) return count_drop(Drop::unauthenticated);
  }
  const auto view = protocol::PacketView::parse(bytes);
  if (!view) return count_drop(Drop::malformed);
  const protocol::Header header = view->header();
  const SwitchJob::Handled handled = job.machine->handle_parent(header, bytes);
  if (handled.outcome == SwitchJob::Outcome::dropped) return count_drop(handled.drop);
  if (handled.outcome == SwitchJob::Outcome::completed) {
    job.parent->machine.handle_result(handled.slot, header.packet_number);
    completed(job, handled.slot);
  } else if (handled.outcome == SwitchJob::Outcome::nack) {
    ++job.counters.parent_nacks;
    if (job.parent->machine.handle_nack(header.chunk, header.elements) == 0) count_drop(Drop::stale);
  } else {  // who it is about is called the same at every switch of the tree
    ++job.counters.mismatches;
    std::vector<std::byte> packet(job.machine->packet_bytes());
    job.machine->write_mismatch(handled.chunk, protocol::CallDescriptor::of(header), header.worker, ++job.told,
                                packet.data());
    append_mac(job, packet);
    send_to_all_but(job, job.workers.size(), packet);
  }
}

void DataPlane::flush_sums(Job& job) {
  if (!job.machine || !job.parent) return;
  Parent& parent = *job.parent;
  const std::size_t mac_bytes = parent.authenticator ? auth::kMacBytes : 0;
  const std::size_t packet_bytes = job.machine->packet_bytes() + mac_bytes;
  const std::size_t per_run = transport::UdpSocket::packets_per_message(packet_bytes);
  std::array<std::uint32_t, transport::UdpSocket::kMaxSegments> slots;
  std::array<iovec, kPieces * transport::UdpSocket::kMaxSegments> pieces;
  std::array<std::byte, auth::kMacBytes * transport::UdpSocket::kMaxSegments> tags;
  bool blocked = false;
  while (!blocked) {
    std::size_t count = 0;
    const std::size_t most = std::min(per_run, parent.port->room(parent.peer));
    while (count < most) {
      const auto send = parent.machine.poll_send();
      if (!send) break;
      const auto sum = job.machine->sum(send->slot, send->packet_number);
      std::byte* tag_of = tags.data() + count * auth::kMacBytes;
      const std::byte* from = sum.data();
      if (parent.authenticator)
        from = sealed(*parent.authenticator, sum, parent.encrypted.data() + count * job.plain.size(), tag_of);
      pieces[count * kPieces] = {const_cast<std::byte*>(from), sum.size()};
      pieces[count * kPieces + 1] = {tag_of, mac_bytes};
      slots[count++] = send->slot;
    }
    if (count == 0) break;
    transport::Datagrams::Run run{.to = parent.peer,
                                  .pieces = {pieces.data(), count * kPieces},
                                  .pieces_per_packet = kPieces,
                                  .packet_bytes = packet_bytes};
    const std::size_t sent = parent.port->send({&run, 1});
    for (std::size_t i = sent; i < count; ++i) parent.machine.not_sent(slots[i]);
    blocked = sent < count;
  }
  if (blocked != parent.blocked) {
    parent.blocked = blocked;
    update_watch(kParentBit | job.id, *parent.port, blocked);
  }
}

void DataPlane::arrived(Job& job, const SwitchJob::Handled& handled, std::int64_t now_ns, bool is_last) {
  ++job.counters.contributions;
  First& first = job.firsts[handled.slot];
  if (first.chunk != handled.chunk) first = {handled.chunk, now_ns};
  ++job.counters.arrivals[handled.worker];
  job.counters.arrival_lag_ns[handled.worker] += static_cast<std::uint64_t>(now_ns - first.ns);
  if (is_last && now_ns > first.ns) ++job.counters.last_arrivals[handled.worker];
}

void DataPlane::hello(Job& job, const protocol::Header& header, std::span<const std::byte> bytes,
                      transport::Datagrams::Peer source) {
  const auto count_drop = [&](Drop reason) { ++job.counters.drops[static_cast<std::size_t>(reason)]; };
  if (header.worker >= job.workers.size()) return count_drop(Drop::worker);
  Worker& worker = job.workers[header.worker];
  const auto right = [&] { return !worker.hello_authenticator || authentic(*worker.hello_authenticator, bytes); };
  const Drop drop = worker.handle_hello(header, job.id, job.incarnation, source, right);
  if (drop != Drop::none) return count_drop(drop);
  ++job.counters.hellos;
  if (job.endpoint == nullptr) return send(job, header.worker, bytes);
  std::vector<std::byte> proof(bytes.begin(), bytes.end());
  protocol::Header with_proof = header;
  with_proof.packet_number = job.proofs[header.worker];
  protocol::write_header(with_proof, proof.data());
  if (worker.hello_authenticator) {
    const std::span<const std::byte> packet(proof.data(), proof.size() - auth::kMacBytes);
    tag(*worker.hello_authenticator, packet, proof.data() + packet.size());
  }
  send(job, header.worker, proof);
}

void DataPlane::queue(Job& job, Worker& worker, std::uint32_t slot) {
  if (worker.asked.size() >= job.results.size()) {
    ++job.counters.backlog_dropped;
    return;
  }
  worker.asked.push_back(slot);
}

void DataPlane::flush(Job& job) {
  if (!job.machine) return;
  const std::size_t packet_bytes = job.machine->packet_bytes() + (job.authenticated ? auth::kMacBytes : 0);
  const std::size_t per_run = transport::UdpSocket::packets_per_message(packet_bytes);
  const std::size_t per_packet = job.authenticated ? kPieces : 1;
  std::array<transport::Datagrams::Run, transport::UdpSocket::kMessagesPerCall> runs;
  std::array<Worker*, transport::UdpSocket::kMessagesPerCall> owners;
  job.pieces.resize(runs.size() * per_run * per_packet);
  for (Worker& worker : job.workers) {
    const std::uint64_t waiting = job.results_count - worker.sent;
    if (waiting <= job.results.size()) continue;
    job.counters.backlog_dropped += waiting - job.results.size();
    worker.sent = job.results_count - job.results.size();
  }
  bool blocked = false;
  for (bool more = true; more && !blocked;) {
    more = false;
    // A run a worker in turn, so that no worker waits for another's whole backlog.
    for (std::size_t next = 0; next < job.workers.size() && !blocked;) {
      std::size_t count = 0;
      std::size_t packets = 0;
      const Worker* before = nullptr;  // whose run has the same results as the next worker's, as most have
      for (; next < job.workers.size() && count < runs.size(); ++next) {
        Worker& worker = job.workers[next];
        const bool asked = !worker.asked.empty();
        const std::uint64_t waiting = asked ? worker.asked.size() : job.results_count - worker.sent;
        if (waiting == 0) continue;
        const std::size_t take = std::min<std::size_t>(waiting, per_run);
        std::span<const iovec> pieces;
        if (before != nullptr && !asked && before->sent == worker.sent) {
          pieces = runs[count - 1].pieces;
        } else {
          iovec* first = job.pieces.data() + count * per_run * per_packet;
          for (std::size_t i = 0; i < take; ++i) {
            const std::uint32_t slot =
                asked ? worker.asked[i] : job.results[(worker.sent + i) & (job.results.size() - 1)];
            add_pieces(job, slot, first + i * per_packet);
          }
          pieces = {first, take * per_packet};
        }
        runs[count] = {
            .to = *worker.address, .pieces = pieces, .pieces_per_packet = per_packet, .packet_bytes = packet_bytes};
        before = asked ? nullptr : &worker;
        owners[count++] = &worker;
        packets += take;
      }
      if (count == 0) break;
      const std::size_t sent = job.port->send({runs.data(), count});
      job.counters.results_sent += sent;
      blocked = sent < packets;
      for (std::size_t i = 0; i < count; ++i) {
        Worker& worker = *owners[i];
        if (worker.asked.empty()) {
          worker.sent += runs[i].taken;
        } else {
          worker.asked.erase(worker.asked.begin(), worker.asked.begin() + static_cast<std::ptrdiff_t>(runs[i].taken));
        }
        more |= !worker.asked.empty() || worker.sent < job.results_count;
      }
    }
  }
  if (blocked != job.blocked) {
    job.blocked = blocked;
    update_watch(job.id, *job.port, blocked);
  }
}

// Of the answer in a slot: the machine's frame or its encrypted form, and its tag.
void DataPlane::add_pieces(Job& job, std::uint32_t slot, iovec* out) {
  const auto frame = job.machine->frame(slot);
  const std::byte* from = job.encrypted.empty() ? frame.data() : job.encrypted.data() + slot * frame.size();
  out[0] = {const_cast<std::byte*>(from), frame.size()};
  if (job.authenticated) out[1] = {job.tags.data() + slot * auth::kMacBytes, auth::kMacBytes};
}

void DataPlane::nack(Job& job, std::uint16_t to, const protocol::GapDetector::Gap& gap) {
  ++job.counters.nacks;
  std::vector<std::byte> packet(job.machine->packet_bytes());
  job.machine->write_nack(to, gap, ++job.told, packet.data());
  append_mac(job, packet);
  send(job, to, packet);  // a hint: where there is no room for it, the worker's timer will do
}

void DataPlane::tell_mismatch(Job& job, const SwitchJob::Handled& handled, const protocol::CallDescriptor& said,
                              std::int64_t now_ns) {
  ++job.counters.mismatches;
  std::vector<std::byte> packet(job.machine->packet_bytes());
  // Each copy of a packet that disagrees gets one answer. All other workers are told at intervals: one must not make
  // the switch send a packet to each of them for every packet of its own.
  if (now_ns >= job.next_mismatch_ns) {
    job.next_mismatch_ns = now_ns + kMismatchNs;
    job.machine->write_mismatch(handled.chunk, said, job.machine->name_of(handled.worker), ++job.told, packet.data());
    append_mac(job, packet);
    send_to_all_but(job, handled.worker, packet);
  }
  packet.resize(job.machine->packet_bytes());
  job.machine->write_mismatch(handled.chunk, job.machine->descriptor(handled.slot), job.machine->name_of(handled.other),
                              ++job.told, packet.data());
  append_mac(job, packet);
  send(job, handled.worker, packet);
}

void DataPlane::append_mac(Job& job, std::vector<std::byte>& packet) {
  if (!job.authenticated) return;
  const std::size_t bytes = packet.size();
  packet.resize(bytes + auth::kMacBytes);
  sealed(*job.result_authenticator, {packet.data(), bytes}, packet.data(), packet.data() + bytes);
}

void DataPlane::send(Job& job, std::uint16_t to, std::span<const std::byte> packet) {
  const iovec piece{const_cast<std::byte*>(packet.data()), packet.size()};
  transport::Datagrams::Run run{.to = *job.workers[to].address, .pieces = {&piece, 1}, .packet_bytes = packet.size()};
  job.port->send({&run, 1});
}

void DataPlane::send_to_all_but(Job& job, std::size_t except, std::span<const std::byte> packet) {
  const iovec piece{const_cast<std::byte*>(packet.data()), packet.size()};
  std::vector<transport::Datagrams::Run> runs;
  for (std::size_t to = 0; to < job.workers.size(); ++to) {
    if (to == except) continue;
    runs.push_back({.to = *job.workers[to].address, .pieces = {&piece, 1}, .packet_bytes = packet.size()});
  }
  job.port->send(runs);
}

void DataPlane::watch(std::uint64_t id, transport::Datagrams& port) {
  const auto hint = port.wait_hint(false);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = id}};
  if (hint.fd >= 0 && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, hint.fd, &event) != 0) transport::throw_errno("epoll_ctl");
  if (port.needs_polling()) polled_ports_.push_back(id);
}

void DataPlane::update_watch(std::uint64_t id, transport::Datagrams& port, bool blocked) {
  const auto hint = port.wait_hint(blocked);
  epoll_event event{.events = static_cast<std::uint32_t>(hint.events), .data = {.u64 = id}};
  if (hint.fd >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, hint.fd, &event);
}

void DataPlane::forget(std::uint64_t id, transport::Datagrams& port) {
  const auto hint = port.wait_hint(false);
  if (hint.fd >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, hint.fd, nullptr);
  std::erase(polled_ports_, id);
}

// Before sleep: how long the ports of fabrics may be left alone. True: not at all.
bool DataPlane::wait_hint() {
  std::int64_t poll_after_ns = -1;
  for (const std::uint64_t id : polled_ports_) {
    Job& job = *jobs_.at(static_cast<std::uint32_t>(id));
    const bool is_parent = (id & kParentBit) != 0;
    const auto hint = is_parent ? job.parent->port->wait_hint(job.parent->blocked) : job.port->wait_hint(job.blocked);
    if (hint.poll_after_ns == 0) return true;
    if (hint.poll_after_ns > 0 && (poll_after_ns < 0 || hint.poll_after_ns < poll_after_ns))
      poll_after_ns = hint.poll_after_ns;
  }
  if (polled_ports_.empty()) return false;
  const itimerspec once{.it_interval = {},
                        .it_value = {.tv_sec = 0, .tv_nsec = std::max<std::int64_t>(0, poll_after_ns)}};
  timerfd_settime(poll_timer_.get(), 0, &once, nullptr);
  return false;
}

}  // namespace netfold::dataplane
