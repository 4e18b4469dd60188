#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>
#include <netfold/aggregator/plane.hpp>

#include <algorithm>
#include <array>
#include <exception>
#include <stdexcept>
#include <system_error>

namespace netfold::aggregator {

using protocol::Drop;
using protocol::SwitchJob;

namespace {

constexpr std::uint32_t kWakeId = 0xffffffff;  // job ids stay below it

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

Plane::Plane() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!epoll_ || !wake_) transport::throw_errno("aggregator: epoll");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeId}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  thread_ = std::thread([this] { run(); });
}

Plane::~Plane() {
  stopping_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  thread_.join();
}

void Plane::on_thread(const std::function<void()>& command) {
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
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  std::unique_lock lock(done_mutex);
  done_condition.wait(lock, [&] { return done; });
  if (error) std::rethrow_exception(error);
}

std::uint16_t Plane::open(std::uint32_t job_id, std::uint32_t incarnation, const std::string& host,
                          const std::vector<std::uint64_t>& nonces, int buffer_bytes) {
  auto job = std::make_unique<Job>();
  job->id = job_id;
  job->incarnation = incarnation;
  job->socket = std::make_unique<transport::UdpSocket>(transport::Address::parse(host, 0), buffer_bytes);
  for (const std::uint64_t nonce : nonces) {
    job->workers.emplace_back();
    job->workers.back().nonce = nonce;
  }
  job->counters.last_arrivals.resize(nonces.size());
  job->counters.arrivals.resize(nonces.size());
  job->counters.arrival_lag_ns.resize(nonces.size());
  const std::uint16_t port = job->socket->local().port();
  on_thread([&] {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = job_id}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, job->socket->fd(), &event) != 0) transport::throw_errno("epoll_ctl");
    jobs_[job_id] = std::move(job);
  });
  return port;
}

int Plane::receive_buffer_bytes(std::uint32_t job_id) {
  int bytes = 0;
  on_thread([&] {
    if (const auto found = jobs_.find(job_id); found != jobs_.end())
      bytes = found->second->socket->receive_buffer_bytes();
  });
  return bytes;
}

void Plane::begin(const protocol::JobConfig& config) {
  // Slots are allocated here, not between two batches of other jobs.
  auto machine = std::make_unique<SwitchJob>(config);
  std::vector<First> firsts(machine->slot_count());
  on_thread([&] {
    const auto found = jobs_.find(config.job);
    if (found == jobs_.end()) throw std::invalid_argument("begin: no such job");
    Job& job = *found->second;
    std::string silent;
    for (std::size_t i = 0; i < job.workers.size(); ++i) {
      if (!job.workers[i].address) silent += " " + std::to_string(i);
    }
    if (!silent.empty()) throw std::invalid_argument("begin: no hello came from worker" + silent);
    job.machine = std::move(machine);
    job.firsts = std::move(firsts);
  });
}

void Plane::close(std::uint32_t job_id) {
  std::unique_ptr<Job> ended;  // freed here, not on the data path
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found == jobs_.end()) return;
    ended = std::move(found->second);
    jobs_.erase(found);
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, ended->socket->fd(), nullptr);
  });
}

std::optional<JobCounters> Plane::counters(std::uint32_t job_id) {
  std::optional<JobCounters> counters;
  on_thread([&] {
    if (const auto found = jobs_.find(job_id); found != jobs_.end()) {
      counters = found->second->counters;
      counters->receive_calls = found->second->socket->receive_calls;
      counters->received_datagrams = found->second->socket->received_datagrams;
      if (const auto* machine = found->second->machine.get()) {
        counters->slots = machine->slot_count();
        counters->slots_collecting = machine->collecting_count();
      }
    }
  });
  return counters;
}

std::vector<std::uint16_t> Plane::missing(std::uint32_t job_id, std::uint64_t chunk) {
  std::vector<std::uint16_t> workers;
  on_thread([&] {
    const auto found = jobs_.find(job_id);
    if (found != jobs_.end() && found->second->machine) workers = found->second->machine->missing(chunk);
  });
  return workers;
}

std::int64_t Plane::cpu_ns() {
  timespec used{};
  on_thread([&] { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used); });
  return static_cast<std::int64_t>(used.tv_sec) * 1'000'000'000 + used.tv_nsec;
}

void Plane::run() {
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < ready; ++i) {
      const auto id = static_cast<std::uint32_t>(events[static_cast<std::size_t>(i)].data.u64);
      if (id == kWakeId) {
        std::uint64_t value = 0;
        [[maybe_unused]] const auto got = ::read(wake_.get(), &value, sizeof value);
        for (;;) {
          std::function<void()> command;
          {
            std::lock_guard lock(mutex_);
            if (commands_.empty()) break;
            command = std::move(commands_.front());
            commands_.pop_front();
          }
          command();
        }
        continue;
      }
      const auto found = jobs_.find(id);
      if (found == jobs_.end()) continue;  // closed by a command of this very turn
      Job& job = *found->second;
      try {
        receive(job);
        flush(job);
      } catch (const std::system_error& error) {
        // A firewall or a shrunken MTU: this job's workers will run into their deadlines; other jobs go on.
        ++job.counters.send_errors;
        job.counters.last_send_error = error.what();
        for (Worker& worker : job.workers) worker.pending.clear();
      }
    }
  }
}

void Plane::receive(Job& job) {
  std::int64_t now_ns = 0;
  job.socket->receive([&](std::span<const std::byte> bytes, const transport::Address& source) {
    if (now_ns == 0) now_ns = monotonic_ns();
    take(job, bytes, source, now_ns);
  });
}

void Plane::take(Job& job, std::span<const std::byte> bytes, const transport::Address& source, std::int64_t now_ns) {
  const auto count_drop = [&](Drop reason) { ++job.counters.drops[static_cast<std::size_t>(reason)]; };
  const auto view = protocol::PacketView::parse(bytes);
  if (!view) return count_drop(Drop::malformed);
  const protocol::Header header = view->header();
  if (header.flags & protocol::kHello) return hello(job, header, bytes, source);
  if (header.worker >= job.workers.size()) return count_drop(Drop::worker);
  if (!job.workers[header.worker].is_at(source)) return count_drop(Drop::source);
  if (!job.machine) return count_drop(Drop::epoch);

  const SwitchJob::Handled handled = job.machine->handle_packet(bytes);
  // A copy of what came before, or of what nobody needs any more, is as good a sign of life of the packets around it.
  if (handled.outcome != SwitchJob::Outcome::dropped || handled.drop == Drop::stale ||
      handled.drop == Drop::duplicate) {
    const auto gap = job.workers[header.worker].arrivals.take(header.counter);
    if (gap.count > 0) notice(job, header.worker, gap);
  }
  switch (handled.outcome) {
    case SwitchJob::Outcome::dropped:
      return count_drop(handled.drop);
    case SwitchJob::Outcome::stored:
      return arrived(job, handled, now_ns);
    case SwitchJob::Outcome::completed:
      arrived(job, handled, now_ns);
      ++job.counters.results;
      job.counters.result_bytes += job.machine->agreement(handled.slot).value_bytes();
      ++job.counters.last_arrivals[handled.worker];
      for (Worker& worker : job.workers) queue(job, worker, handled.slot);
      return;
    case SwitchJob::Outcome::answered:
      ++job.counters.answers_again;
      return queue(job, job.workers[handled.worker], handled.slot);
    case SwitchJob::Outcome::mismatch:
      return tell_mismatch(job, handled, bytes);
  }
}

void Plane::arrived(Job& job, const SwitchJob::Handled& handled, std::int64_t now_ns) {
  ++job.counters.contributions;
  First& first = job.firsts[handled.slot];
  if (first.chunk != handled.chunk) first = {handled.chunk, now_ns};
  ++job.counters.arrivals[handled.worker];
  job.counters.arrival_lag_ns[handled.worker] += static_cast<std::uint64_t>(now_ns - first.ns);
}

void Plane::hello(Job& job, const protocol::Header& header, std::span<const std::byte> bytes,
                  const transport::Address& source) {
  const auto count_drop = [&](Drop reason) { ++job.counters.drops[static_cast<std::size_t>(reason)]; };
  if (header.worker >= job.workers.size()) return count_drop(Drop::worker);
  Worker& worker = job.workers[header.worker];
  const Drop drop = worker.handle_hello(header, job.id, job.incarnation, job.machine != nullptr, source);
  if (drop != Drop::none) return count_drop(drop);
  ++job.counters.hellos;
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  const transport::UdpSocket::Run run{.to = &*worker.address, .pieces = {&piece, 1}, .packet_bytes = bytes.size()};
  job.socket->send({&run, 1});
}

void Plane::queue(Job& job, Worker& worker, std::uint32_t slot) {
  if (worker.pending.size() >= job.machine->slot_count()) {
    ++job.counters.backlog_dropped;
    return;
  }
  worker.pending.push_back(slot);
}

void Plane::flush(Job& job) {
  if (!job.machine) return;
  const std::size_t packet_bytes = job.machine->packet_bytes();
  const std::size_t per_run =
      std::min(transport::UdpSocket::kMaxSegments, transport::UdpSocket::kMaxSuperBytes / packet_bytes + 1);
  std::array<transport::UdpSocket::Run, transport::UdpSocket::kMessagesPerCall> runs;
  std::array<Worker*, transport::UdpSocket::kMessagesPerCall> owners;
  job.pieces.resize(runs.size() * per_run);
  bool blocked = false;
  for (bool more = true; more && !blocked;) {
    more = false;
    // A run a worker in turn, so that no worker waits for another's whole backlog.
    for (std::size_t next = 0; next < job.workers.size() && !blocked;) {
      std::size_t count = 0;
      std::size_t packets = 0;
      for (; next < job.workers.size() && count < runs.size(); ++next) {
        Worker& worker = job.workers[next];
        if (worker.pending.empty()) continue;
        const std::size_t take = std::min(worker.pending.size(), per_run);
        iovec* first = job.pieces.data() + count * per_run;
        for (std::size_t i = 0; i < take; ++i) {
          const auto frame = job.machine->frame(worker.pending[i]);
          first[i] = {const_cast<std::byte*>(frame.data()), frame.size()};
        }
        runs[count] = {.to = &*worker.address, .pieces = {first, take}, .packet_bytes = packet_bytes};
        owners[count++] = &worker;
        packets += take;
      }
      if (count == 0) break;
      std::size_t sent = job.socket->send({runs.data(), count});
      job.counters.answers_sent += sent;
      blocked = sent < packets;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t mine = std::min(sent, runs[i].pieces.size());
        owners[i]->pending.erase(owners[i]->pending.begin(),
                                 owners[i]->pending.begin() + static_cast<std::ptrdiff_t>(mine));
        sent -= mine;
        more |= !owners[i]->pending.empty();
      }
    }
  }
  if (blocked != job.blocked) {
    job.blocked = blocked;
    watch(job, blocked);
  }
}

void Plane::notice(Job& job, std::uint16_t to, const protocol::Arrivals::Gap& gap) {
  ++job.counters.notices;
  std::vector<std::byte> packet(job.machine->packet_bytes());
  job.machine->write_notice(to, gap, packet.data());
  const iovec piece{packet.data(), packet.size()};
  const transport::UdpSocket::Run run{
      .to = &*job.workers[to].address, .pieces = {&piece, 1}, .packet_bytes = packet.size()};
  job.socket->send({&run, 1});  // a hint: where there is no room for it, the worker's timer will do
}

void Plane::tell_mismatch(Job& job, const SwitchJob::Handled& handled, std::span<const std::byte> bytes) {
  ++job.counters.mismatches;
  const auto said = protocol::Agreement::of(protocol::PacketView::parse(bytes)->header());
  std::vector<std::byte> packet(job.machine->packet_bytes());
  const auto send = [&](std::uint16_t to) {
    const iovec piece{packet.data(), packet.size()};
    const transport::UdpSocket::Run run{
        .to = &*job.workers[to].address, .pieces = {&piece, 1}, .packet_bytes = packet.size()};
    job.socket->send({&run, 1});
  };
  job.machine->write_mismatch(handled.chunk, said, handled.worker, packet.data());
  for (std::uint16_t to = 0; to < job.workers.size(); ++to) {
    if (to != handled.worker) send(to);
  }
  job.machine->write_mismatch(handled.chunk, job.machine->agreement(handled.slot), handled.other, packet.data());
  send(handled.worker);
}

void Plane::watch(const Job& job, bool writable) {
  std::uint32_t events = EPOLLIN;
  if (writable) events |= EPOLLOUT;
  epoll_event event{.events = events, .data = {.u64 = job.id}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, job.socket->fd(), &event);
}

}  // namespace netfold::aggregator
