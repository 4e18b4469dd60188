// The switch's data plane: one thread that serves every job's port, one batch of packets at a time.
//
// Files. JobPort: one job's port, a UDP socket or an endpoint of a fabric, and the job's SwitchJob. ParentPort: the
// second port of a job whose switch is a leaf. Egress: the queues of results to a job's workers. CommandQueue: commands
// of other threads, which run between two batches, so that the data path takes no lock.
//
// Admission. netfold.switch decides who is a member. `open` gives every worker a nonce. A worker proves its path and
// its address by a hello packet with that nonce, which the data plane returns unchanged. `begin` sets the epoch.
// On a fabric a worker's packets are known by a tag that only this worker was told, but the address that it names may
// be anybody's. So the returned hello carries another number, the worker's *proof*. The worker repeats the proof over
// the control connection, which shows that packets to that address reach this worker.
//
// What must always hold. The data plane sends nothing to an address that has not shown a nonce, or that its worker did
// not name over the control connection. It accepts a contribution from the worker's registered address only.
// In a job with keys every packet carries a MAC (netfold/auth), the switch's own packets too. No field of a packet is
// believed before its MAC is checked. A result is authenticated once, when its chunk is complete, for all workers.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/dataplane/job_counters.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/transport/fabric/endpoint.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace netfold::dataplane {

class CommandQueue;
class JobPort;

// The keys of a job's packets in one epoch.
struct JobKeys {
  std::vector<auth::Key> contributions;  // by worker
  auth::Key results{};                   // one key for all workers: an answer is the same bytes for each
};

// The keys of the packets between a leaf and its parent, in one epoch of the parent's job.
struct ParentKeys {
  auth::Key sums{};
  auth::Key results{};
};

// Thread-safe: every method but the constructor and the destructor waits for the data plane's thread.
class DataPlane {
 public:
  struct Options {
    int core = -1;                  // the thread stays on this core, with slots in memory near it; -1: any core
    std::int64_t busy_poll_ns = 0;  // the thread polls for so long after the last packet before it sleeps
  };
  // Throws std::invalid_argument for a core that this process may not use.
  explicit DataPlane(const Options& options);
  ~DataPlane();  // stops the thread
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  // Binds a UDP port of `host`, which may be the wildcard address, for the job and accepts hellos; returns the port.
  // `hello_keys`: by worker, or empty for a job whose packets carry no MAC.
  // Throws std::system_error; std::runtime_error where this host cannot check a MAC.
  std::uint16_t open(std::uint32_t job, std::uint32_t incarnation, const std::string& host,
                     const std::vector<std::uint64_t>& nonces, const std::vector<auth::Key>& hello_keys,
                     std::size_t buffer_bytes);
  struct FabricAddress {
    std::vector<std::byte> name;
    std::vector<std::uint64_t> tags;  // by worker: the tag of the worker's packets
    std::size_t packet_bytes = 0;     // of the longest packet that the endpoint takes
    std::size_t buffer_bytes = 0;     // of memory for packets
  };
  // As `open`, with an endpoint of a fabric for packets of up to `packet_bytes`, of which each worker may have
  // `in_flight_bytes` in flight. `proofs`: by worker, different from the worker's nonce. Throws fabric::Error.
  FabricAddress open_on_fabric(std::uint32_t job, std::uint32_t incarnation,
                               std::unique_ptr<transport::fabric::Endpoint> fabric_endpoint,
                               const std::vector<std::uint64_t>& nonces, const std::vector<std::uint64_t>& proofs,
                               const std::vector<auth::Key>& hello_keys, std::size_t packet_bytes,
                               std::size_t in_flight_bytes);
  // Sets the numeric address that the worker sends from. Hellos from other addresses, and earlier ones, are dropped.
  // `local`: this host's address that the worker was told, the source of answers to it; empty: the route's address.
  void set_worker_address(std::uint32_t job, std::uint16_t worker, const std::string& host, std::uint16_t port,
                          const std::string& local);
  // Sets the worker's address on the job's fabric, and the tag of packets to it. Throws fabric::Error.
  void set_worker_fabric_address(std::uint32_t job, std::uint16_t worker, const std::vector<std::byte>& name,
                                 std::uint64_t tag);
  // Returns the size of the buffer for packets that arrived and were not read: as the kernel granted it, or as posted.
  std::size_t receive_buffer_bytes(std::uint32_t job);
  // Sends the job's sums through `port`, whose hello the parent accepted, to the parent's data port `to`.
  void connect_parent(std::uint32_t job, std::unique_ptr<transport::Datagrams> port, transport::Datagrams::Peer to);
  // Allocates the slots and accepts contributions, once all workers are verified. A job begins once.
  // `keys`: exactly for a job that was opened with hello keys. `parent_keys`: where packets to the parent carry a MAC.
  // `security`: of packets with keys, here and at the parent.
  // A config with a parent needs connect_parent first, and a config without one must not have it.
  // Throws std::invalid_argument for a job that has begun, and naming the workers whose hello did not come.
  void begin(const protocol::JobConfig& config, const std::optional<JobKeys>& keys,
             const std::optional<ParentKeys>& parent_keys, auth::Security security = auth::Security::authenticate);
  void close(std::uint32_t job);

  std::optional<JobCounters> counters(std::uint32_t job);
  std::vector<std::uint16_t> missing(std::uint32_t job, std::uint64_t chunk);
  struct Reading {
    std::int64_t cpu_ns = 0;  // that the thread has used
    std::map<std::uint32_t, JobCounters> jobs;
  };
  // Returns all jobs' counters by one command, however many jobs there are.
  Reading read();

 private:
  void run();
  // Runs `command` on the thread with that job; returns whether the job exists.
  bool on_job(std::uint32_t job, const std::function<void(JobPort&)>& command);
  void add(std::uint32_t id, std::unique_ptr<JobPort> job);
  void serve(std::uint64_t source);
  void watch(std::uint64_t source, transport::Datagrams& port);
  void update_watch(std::uint64_t source, const transport::Datagrams::WaitHint& hint);
  void unwatch(std::uint64_t source, transport::Datagrams& port);
  bool arm_poll_timer();

  Options options_;
  transport::Fd epoll_;
  transport::Fd poll_timer_;
  std::vector<std::uint64_t> polled_ports_;  // ports whose wait hint is needed before each sleep
  std::unordered_map<std::uint32_t, std::unique_ptr<JobPort>> jobs_;  // used by the thread only
  std::unique_ptr<CommandQueue> commands_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace netfold::dataplane
