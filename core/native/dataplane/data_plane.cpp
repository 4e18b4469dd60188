#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <netfold/dataplane/data_plane.hpp>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <system_error>

#include "command_queue.hpp"
#include "job_port.hpp"

namespace netfold::dataplane {
namespace {

// Sources of epoll events. A job's id (below kCommandsSource) is the job's port; with kParentBit, its parent's port.
constexpr std::uint64_t kCommandsSource = 0xffffffff;
constexpr std::uint64_t kParentBit = std::uint64_t{1} << 32;
constexpr std::uint64_t kPollTimerSource = std::uint64_t{1} << 33;

// Keeps the calling thread on a core during its lifetime, so that memory that the thread touches first is near that
// core; -1: changes nothing.
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
      poll_timer_(transport::make_timer()),
      commands_(std::make_unique<CommandQueue>()) {
  if (!epoll_) transport::throw_errno("data plane: epoll");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kCommandsSource}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, commands_->fd(), &event);
  event.data.u64 = kPollTimerSource;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, poll_timer_.get(), &event);
  if (options.core >= CPU_SETSIZE) throw std::invalid_argument("there is no core " + std::to_string(options.core));
  // A new thread inherits its creator's cores, and stays there.
  const OnCore creator(options.core);
  thread_ = std::thread([this] { run(); });
}

DataPlane::~DataPlane() {
  stopping_ = true;
  commands_->wake();
  thread_.join();
}

bool DataPlane::on_job(std::uint32_t job, const std::function<void(JobPort&)>& command) {
  bool is_found = false;
  commands_->run([&] {
    const auto found = jobs_.find(job);
    is_found = found != jobs_.end();
    if (is_found) command(*found->second);
  });
  return is_found;
}

void DataPlane::add(std::uint32_t id, std::unique_ptr<JobPort> job) {
  commands_->run([&] {
    watch(id, job->port());
    jobs_[id] = std::move(job);
  });
}

std::uint16_t DataPlane::open(std::uint32_t job, std::uint32_t incarnation, const std::string& host,
                              const std::vector<std::uint64_t>& nonces, const std::vector<auth::Key>& hello_keys,
                              std::size_t buffer_bytes) {
  auto socket = std::make_unique<transport::UdpSocket>(transport::Address::parse(host, 0), buffer_bytes);
  const std::uint16_t port = socket->local().port();
  add(job, std::make_unique<JobPort>(job, incarnation, nonces, hello_keys, std::move(socket)));
  return port;
}

DataPlane::FabricAddress DataPlane::open_on_fabric(std::uint32_t job, std::uint32_t incarnation,
                                                   std::unique_ptr<transport::fabric::Endpoint> fabric_endpoint,
                                                   const std::vector<std::uint64_t>& nonces,
                                                   const std::vector<std::uint64_t>& proofs,
                                                   const std::vector<auth::Key>& hello_keys, std::size_t packet_bytes,
                                                   std::size_t in_flight_bytes) {
  auto endpoint = std::make_unique<transport::fabric::FabricDatagrams>(std::move(fabric_endpoint), packet_bytes,
                                                                       in_flight_bytes, nonces.size());
  FabricAddress address{.name = endpoint->name(),
                        .tags = {},
                        .packet_bytes = endpoint->packet_bytes(),
                        .buffer_bytes = endpoint->buffer_bytes()};
  for (std::size_t i = 0; i < nonces.size(); ++i) {
    address.tags.push_back(endpoint->tag(static_cast<transport::Datagrams::Peer>(i)));
  }
  add(job, std::make_unique<JobPort>(job, incarnation, nonces, hello_keys, std::move(endpoint), proofs));
  return address;
}

void DataPlane::set_worker_address(std::uint32_t job, std::uint16_t worker, const std::string& host, std::uint16_t port,
                                   const std::string& local) {
  const transport::Address address = transport::Address::parse(host, port);
  std::optional<transport::Address> source;
  if (!local.empty()) source = transport::Address::parse(local, 0);
  on_job(job, [&](JobPort& found) { found.set_worker_address(worker, address, source); });
}

void DataPlane::set_worker_fabric_address(std::uint32_t job, std::uint16_t worker, const std::vector<std::byte>& name,
                                          std::uint64_t tag) {
  on_job(job, [&](JobPort& found) { found.set_worker_fabric_address(worker, name, tag); });
}

std::size_t DataPlane::receive_buffer_bytes(std::uint32_t job) {
  std::size_t bytes = 0;
  on_job(job, [&](JobPort& found) { bytes = found.port().receive_buffer_bytes(); });
  return bytes;
}

void DataPlane::connect_parent(std::uint32_t job, std::unique_ptr<transport::Datagrams> port,
                               transport::Datagrams::Peer to) {
  const bool is_found = on_job(job, [&](JobPort& found) {
    watch(kParentBit | job, *port);
    found.connect_parent(std::move(port), to);
  });
  if (!is_found) throw std::invalid_argument("connect_parent: no such job");
}

void DataPlane::begin(const protocol::JobConfig& config, const std::optional<JobKeys>& keys,
                      const std::optional<ParentKeys>& parent_keys, auth::Security security) {
  // Allocate the slots here, not between two batches of other jobs.
  const OnCore near(options_.core);
  auto session = std::make_unique<JobSession>(config, keys, parent_keys, security);
  if (!on_job(config.job, [&](JobPort& found) { found.begin(std::move(session), keys.has_value()); })) {
    throw std::invalid_argument("begin: no such job");
  }
}

void DataPlane::close(std::uint32_t job) {
  std::unique_ptr<JobPort> ended;  // freed here, not on the data path
  on_job(job, [&](JobPort& found) {
    unwatch(job, found.port());
    if (found.parent()) unwatch(kParentBit | job, found.parent()->port());
    const auto at = jobs_.find(job);
    ended = std::move(at->second);
    jobs_.erase(at);
  });
}

std::optional<JobCounters> DataPlane::counters(std::uint32_t job) {
  std::optional<JobCounters> counters;
  on_job(job, [&](JobPort& found) { counters = found.counters(); });
  return counters;
}

DataPlane::Reading DataPlane::read() {
  Reading reading;
  commands_->run([&] {
    reading.cpu_ns = transport::clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (const auto& [id, job] : jobs_) reading.jobs.emplace(id, job->counters());
  });
  return reading;
}

std::vector<std::uint16_t> DataPlane::missing(std::uint32_t job, std::uint64_t chunk) {
  std::vector<std::uint16_t> workers;
  on_job(job, [&](JobPort& found) { workers = found.missing(chunk); });
  return workers;
}

void DataPlane::run() {
  std::array<epoll_event, 64> events;
  std::int64_t busy_until_ns = 0;
  while (!stopping_) {
    const bool polls = arm_poll_timer() || (options_.busy_poll_ns > 0 && transport::now_ns() < busy_until_ns);
    const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), polls ? 0 : -1);
    if (ready > 0 && options_.busy_poll_ns > 0) busy_until_ns = transport::now_ns() + options_.busy_poll_ns;
    bool serve_polled_ports = polls;
    for (int i = 0; i < ready; ++i) {
      const std::uint64_t source = events[static_cast<std::size_t>(i)].data.u64;
      // Between two jobs too: with many busy jobs a command would otherwise wait for a batch of each.
      if (commands_->has_pending()) commands_->serve();
      if (source == kPollTimerSource) {
        clear(poll_timer_);
        serve_polled_ports = true;
      } else if (source == kCommandsSource) {
        // Clear first: a command that is queued before the clearing causes no further event.
        commands_->clear_wake();
        commands_->serve();
      } else {
        serve(source);
      }
    }
    if (!serve_polled_ports) continue;
    for (const std::uint64_t source : polled_ports_) serve(source);
  }
}

void DataPlane::serve(std::uint64_t source) {
  const auto id = static_cast<std::uint32_t>(source);
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;  // a command closed the job after epoll_wait
  JobPort& job = *found->second;
  try {
    if (source & kParentBit) {
      job.receive_from_parent();
    } else {
      job.receive();
    }
    if (job.flush()) update_watch(id, job.wait_hint());
    if (job.flush_sums()) update_watch(kParentBit | id, job.parent()->wait_hint());
  } catch (const std::system_error& error) {
    job.fail(error.what());  // other jobs go on
  }
}

void DataPlane::watch(std::uint64_t source, transport::Datagrams& port) {
  const auto hint = port.wait_hint(false);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = source}};
  if (hint.fd >= 0 && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, hint.fd, &event) != 0) transport::throw_errno("epoll_ctl");
  if (port.needs_polling()) polled_ports_.push_back(source);
}

void DataPlane::update_watch(std::uint64_t source, const transport::Datagrams::WaitHint& hint) {
  epoll_event event{.events = static_cast<std::uint32_t>(hint.events), .data = {.u64 = source}};
  if (hint.fd >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, hint.fd, &event);
}

void DataPlane::unwatch(std::uint64_t source, transport::Datagrams& port) {
  const auto hint = port.wait_hint(false);
  if (hint.fd >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, hint.fd, nullptr);
  std::erase(polled_ports_, source);
}

// Before a sleep: arms the timer for the earliest time at which a polled port must be served. True: serve it now.
bool DataPlane::arm_poll_timer() {
  if (polled_ports_.empty()) return false;
  std::int64_t poll_after_ns = -1;
  for (const std::uint64_t source : polled_ports_) {
    JobPort& job = *jobs_.at(static_cast<std::uint32_t>(source));
    const auto hint = (source & kParentBit) != 0 ? job.parent()->wait_hint() : job.wait_hint();
    if (hint.poll_after_ns == 0) return true;
    if (hint.poll_after_ns > 0 && (poll_after_ns < 0 || hint.poll_after_ns < poll_after_ns))
      poll_after_ns = hint.poll_after_ns;
  }
  set_timer(poll_timer_, std::max<std::int64_t>(0, poll_after_ns));
  return false;
}

}  // namespace netfold::dataplane
