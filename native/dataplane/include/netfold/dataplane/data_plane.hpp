// The aggregator's data plane: ports round the switch machine.
//
// Each job has a port of its own, a UDP socket or an endpoint of a fabric, and a SwitchJob; one thread serves them all,
// a batch of a job at a time.
// Membership is decided elsewhere (netfold.switch): a job is opened with a nonce a worker; a worker proves
// the path and its address by a hello packet that carries its nonce, which comes back unchanged; `begin`
// gives the epoch. The plane answers no address that has not shown a nonce and that its worker did not name
// over the control connection, and takes no contribution from another than the registered address. Over a fabric,
// where a packet is known to be a worker's by a tag that only it was told, and where the address that a worker names
// may be anybody's, a hello comes back with another number, the worker's *proof*, which it says over the control
// connection: so what is sent to that address reaches the worker.
//
// Every packet of a job with keys carries a tag (netfold/auth), its own ones too: nothing in a packet is believed
// before its tag is checked. A result gets its tag once, when its chunk is complete, for all workers.
//
// A job whose switch is a leaf has a second port, to the parent: sums go up there, and the parent's results, NACKs
// and mismatches come down, from the parent's address alone.
//
// Commands from other threads run between two batches, so the data path takes no lock.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/protocol/address_validation.hpp>
#include <netfold/protocol/parent_sender.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/transport/fabric/fabric_datagrams.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace netfold::dataplane {

struct JobCounters {
  std::uint64_t contributions = 0;   // packets that counted
  std::uint64_t results = 0;         // chunks completed
  std::uint64_t result_bytes = 0;    // of their values, without padding
  std::uint64_t results_sent = 0;    // packets
  std::uint64_t results_resent = 0;  // to late duplicates
  std::uint64_t nacks = 0;           // to workers, of packets that did not come
  std::uint64_t mismatches = 0;
  std::uint64_t hellos = 0;
  std::uint64_t backlog_dropped = 0;  // answers dropped since a worker's queue was full; it will ask again
  std::uint64_t send_errors = 0;      // refused by the operating system
  std::string last_send_error;
  std::uint64_t drops[protocol::kDropCount] = {};
  std::uint64_t receive_calls = 0;
  std::uint64_t received_datagrams = 0;
  // By worker: how often it was the one all others waited for, as far as the clock tells (below).
  std::vector<std::uint64_t> last_arrivals;
  // By worker: contributions that counted, and how long after their chunk's first they came, summed. The clock is
  // read once a batch, so what arrived in one batch counts as simultaneous.
  std::vector<std::uint64_t> arrivals;
  std::vector<std::uint64_t> arrival_lag_ns;
  std::uint32_t slots = 0;             // 0 before the job begins
  std::uint32_t slots_collecting = 0;  // hold contributions of some workers and wait for the others
  // Of the link to the parent; all 0 without one.
  std::uint32_t slots_summed = 0;  // wait for the parent's result
  std::uint64_t sums_sent = 0;     // packets
  std::uint64_t sums_resent = 0;   // among them, of sums that were sent before
  std::uint64_t parent_nacks = 0;
  std::uint64_t parent_drops[protocol::kDropCount] = {};
};

// The keys of a job's packets in one epoch.
struct JobKeys {
  std::vector<auth::Key> contributions;  // by worker
  auth::Key results{};                   // one for all: an answer is the same bytes for each
};

// The keys of the packets between a leaf and its parent in one epoch of the parent's.
struct ParentKeys {
  auth::Key sums{};
  auth::Key results{};
};

class DataPlane {
 public:
  struct Options {
    int core = -1;                  // that the thread stays on, with slots in memory near it; -1: any
    std::int64_t busy_poll_ns = 0;  // how long the thread looks for packets, without sleep, after the last one
  };
  // Throws std::invalid_argument for a core that this process may not use.
  explicit DataPlane(const Options& options);
  ~DataPlane();  // stops the thread
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  // Binds a port of `host`, which may be the wildcard address, for the job and waits for hellos; returns the port.
  // `hello_keys`: by worker, or empty for a job whose packets carry no tags. Throws std::system_error;
  // std::runtime_error where no tag can be checked.
  std::uint16_t open(std::uint32_t job, std::uint32_t incarnation, const std::string& host,
                     const std::vector<std::uint64_t>& nonces, const std::vector<auth::Key>& hello_keys,
                     std::size_t buffer_bytes);
  // As `open`, on a fabric: an endpoint of `wire`, for packets of up to `packet_bytes` and so many in flight from each
  // worker. Throws fabric::Error. `proofs`: by worker, none of them its nonce.
  struct FabricAddress {
    std::vector<std::byte> name;
    std::vector<std::uint64_t> tags;  // by worker: of what it sends
    std::size_t packet_bytes = 0;     // of the longest that is taken
    std::size_t buffer_bytes = 0;     // of memory for packets
  };
  FabricAddress open_on_fabric(std::uint32_t job, std::uint32_t incarnation,
                               std::unique_ptr<transport::fabric::Endpoint> fabric_endpoint,
                               const std::vector<std::uint64_t>& nonces, const std::vector<std::uint64_t>& proofs,
                               const std::vector<auth::Key>& hello_keys, std::size_t packet_bytes,
                               std::size_t in_flight_bytes);
  // Where the worker will send from, a numeric address: hellos from elsewhere are dropped, and so are all before.
  // `local`: this host's address that the worker was told, which answers to it come from; empty: the route's.
  void set_worker_address(std::uint32_t job, std::uint16_t worker, const std::string& host, std::uint16_t port,
                          const std::string& local);
  // Where the worker is on the job's fabric, and how it wants packets to be tagged. Throws fabric::Error.
  void set_worker_fabric_address(std::uint32_t job, std::uint16_t worker, const std::vector<std::byte>& name,
                                 std::uint64_t tag);
  // What holds packets of the job that have arrived and were not read: as the kernel granted it, or as was posted.
  std::size_t receive_buffer_bytes(std::uint32_t job);
  // The job's sums go to the parent's data port `to`, through `port`, which showed the parent its place by a hello.
  void connect_parent(std::uint32_t job, std::unique_ptr<transport::Datagrams> port, transport::Datagrams::Peer to);
  // All workers are verified: allocate the slots and start to count. `keys`: of a job that was opened with keys, and of
  // no other. With a parent in the config, after connect_parent; `parent_keys`: where its packets carry tags. Throws
  // std::invalid_argument naming the workers that have not said hello.
  // `security`: of packets with keys, here and at the parent.
  void begin(const protocol::JobConfig& config, const std::optional<JobKeys>& keys,
             const std::optional<ParentKeys>& parent_keys, auth::Security security = auth::Security::authenticate);
  void close(std::uint32_t job);

  std::optional<JobCounters> counters(std::uint32_t job);
  std::vector<std::uint16_t> missing(std::uint32_t job, std::uint64_t chunk);
  // All jobs' counters, and the CPU time that the thread has used: one turn of it, however many jobs there are.
  struct Reading {
    std::int64_t cpu_ns = 0;
    std::map<std::uint32_t, JobCounters> jobs;
  };
  Reading read();

 private:
  struct Worker : protocol::AddressValidation<transport::Datagrams::Peer> {
    std::optional<auth::PacketAuthenticator> hello_authenticator;
    std::optional<auth::PacketAuthenticator> authenticator;  // of contributions
    protocol::GapDetector gap_detector;
    std::uint64_t sent = 0;           // of the job's results
    std::deque<std::uint32_t> asked;  // slots whose answer this worker asked for again, at most slot_count()
  };
  // When the first contribution to a slot's present chunk came.
  struct First {
    std::uint64_t chunk = ~std::uint64_t{0};
    std::int64_t ns = 0;
  };
  struct Parent {
    std::unique_ptr<transport::Datagrams> port;
    transport::Datagrams::Peer peer = transport::Datagrams::kUnknownPeer;
    protocol::ParentSender machine{0};
    std::optional<auth::PacketAuthenticator> authenticator;         // of sums
    std::optional<auth::PacketAuthenticator> result_authenticator;  // of what the parent says
    std::vector<std::byte> encrypted;                               // sums of one run
    bool blocked = false;
  };
  struct Job {
    std::uint32_t id = 0;
    std::uint32_t incarnation = 0;
    std::unique_ptr<transport::Datagrams> port;
    transport::UdpSocket* socket = nullptr;                  // the port, over UDP
    transport::fabric::FabricDatagrams* endpoint = nullptr;  // the port, on a fabric
    std::vector<std::uint64_t> proofs;                       // there
    std::unique_ptr<protocol::SwitchJob> machine;
    std::vector<Worker> workers;
    JobCounters counters;
    std::vector<First> firsts;  // by slot
    // The slots of the last slot_count() results, a ring, and how many there were. A slot that has a new tenant by the
    // time it is sent still holds a whole, final result, with its own chunk number on it: never wrong, at worst not
    // needed.
    std::vector<std::uint32_t> results;
    std::uint64_t results_count = 0;
    bool authenticated = false;
    std::optional<auth::PacketAuthenticator> result_authenticator;
    std::vector<std::byte> tags;        // of the slots' frames
    std::vector<std::byte> encrypted;   // the slots' frames, where packets are encrypted
    std::vector<std::byte> plain;       // a packet that came, decrypted
    std::uint64_t told = 0;             // mismatches and NACKs written
    std::int64_t next_mismatch_ns = 0;  // when all workers may be told of one again
    std::optional<Parent> parent;
    bool blocked = false;
    std::vector<iovec> pieces;
    std::vector<std::uint16_t> order;  // of a batch's trains
  };

  void run();
  void run_commands();
  void on_thread(const std::function<void()>& command);
  void receive(Job& job);
  void take(Job& job, std::span<const std::byte> bytes, transport::Datagrams::Peer source, std::int64_t now_ns);
  void arrived(Job& job, const protocol::SwitchJob::Handled& handled, std::int64_t now_ns, bool is_last);
  void hello(Job& job, const protocol::Header& header, std::span<const std::byte> bytes,
             transport::Datagrams::Peer source);
  void queue(Job& job, Worker& worker, std::uint32_t slot);
  void flush(Job& job);
  static void add_pieces(Job& job, std::uint32_t slot, iovec* out);
  void receive_from_parent(Job& job);
  void take_from_parent(Job& job, std::span<const std::byte> bytes, transport::Datagrams::Peer source);
  void flush_sums(Job& job);
  void completed(Job& job, std::uint32_t slot);
  void send(Job& job, std::uint16_t to, std::span<const std::byte> packet);
  void append_mac(Job& job, std::vector<std::byte>& packet);
  void nack(Job& job, std::uint16_t to, const protocol::GapDetector::Gap& gap);
  void tell_mismatch(Job& job, const protocol::SwitchJob::Handled& handled, const protocol::CallDescriptor& said,
                     std::int64_t now_ns);
  // Batched; `except`: a worker, or as many as there are for all.
  void send_to_all_but(Job& job, std::size_t except, std::span<const std::byte> packet);
  std::unique_ptr<Job> make_job(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
                                const std::vector<auth::Key>& hello_keys);
  void add(std::unique_ptr<Job> job);
  void serve(std::uint64_t id);
  void watch(std::uint64_t id, transport::Datagrams& port);
  void update_watch(std::uint64_t id, transport::Datagrams& port, bool blocked);
  void forget(std::uint64_t id, transport::Datagrams& port);
  bool wait_hint();
  static JobCounters counters_of(const Job& job);

  Options options_;
  transport::Fd epoll_;
  transport::Fd wake_;
  transport::Fd poll_timer_;
  std::vector<std::uint64_t> polled_ports_;  // ports that are asked each time whether, and for how long, to sleep
  std::unordered_map<std::uint32_t, std::unique_ptr<Job>> jobs_;  // the thread's alone
  std::mutex mutex_;
  std::deque<std::function<void()>> commands_;
  std::atomic<bool> has_commands_{false};  // written under the mutex; a hint to look, so that the data path takes none
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace netfold::dataplane
