// The plugin's part of a process: it listens, connects, and makes broken connections again.
//
// One thread accepts connections; each handshake runs on a thread of its own, at most kMaxHandshakes at a time. For one
// more, and where descriptors run out, the oldest is dropped once it is kLeastNs old: the rule of every listener of netfold
// (core/src/netfold/switch_protocol/acceptor.py). Another
// thread looks at all links: it finds broken connections, makes them again or asks the other end to, and gives them up
// when the time is over. It also closes comms once what they sent has arrived.
//
// Lives as long as the process. NCCL may close the shared object while these threads run, so that it stays loaded
// (CMakeLists.txt: nodelete).
#pragma once

#include <netfold/transport/condition.hpp>

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm.hpp"
#include "devices.hpp"
#include "fabric_ports.hpp"
#include "settings.hpp"

namespace netfold::nccl {

// Goes from the rank that listens to the rank that connects, over NCCL's bootstrap.
struct Handle {
  std::array<char, 4> magic = {'n', 'f', 'n', '2'};
  std::uint8_t family = 0;  // 4 or 6
  std::uint8_t streams = 1;
  std::uint16_t port = 0;
  std::array<std::byte, 16> address{};
  std::uint32_t scope = 0;
  std::uint32_t rma_min_bytes = 0;  // of the shortest part that this end takes by RMA; 0: it takes none
  std::uint32_t tuning = 0;         // tuning_checksum
  std::uint32_t takes_gpus = 0;     // 1: this end may receive into memory of a GPU
  Id listener{};
  auth::Secret secret{};
  std::array<char, 24> fabric{};  // the provider, cut to this length; empty: TCP
  // Of the connecting rank: NCCL repeats its call with the same handle until there is a connection. A number and no
  // address, since the other rank gave the handle.
  std::uint64_t pending = 0;
};
static_assert(sizeof(Handle) <= kHandleBytes);
// Throws std::runtime_error for a handle of another plugin, or of NCCL's own.
void require_own(const Handle& handle);

// Collects the connections to one handle. Those of the other ranks of a collective communicator (`members`) stay as they
// are; of others it makes comms.
class Listener {
 public:
  enum class Of : std::uint8_t { comms, members };

  Listener(Id id, int device, Of of) : id_(id), device_(device), of_(of) {}
  const Id& id() const { return id_; }
  int device() const { return device_; }
  // A comm whose connections are all there; null: none yet.
  std::shared_ptr<Comm> next();

  struct Member {
    int rank = -1;
    Connections connections;
  };
  // Waits for a member whose connections are all there. nullopt: none came until `deadline_ns`.
  std::optional<Member> next_member(std::int64_t deadline_ns);

 private:
  friend class Endpoint;
  struct Arriving {
    Connections connections;
    std::size_t count = 0;
  };

  const Id id_;
  const int device_;
  const Of of_;
  std::mutex mutex_;
  transport::Condition arrived_;
  bool is_closed_ = false;
  std::map<Id, Arriving> arriving_;
  std::deque<std::shared_ptr<Comm>> ready_;
  std::deque<Member> members_;
};

// A comm that is being connected.
class Connecting {
 public:
  // Null while it is under way. Throws std::runtime_error where it failed.
  std::shared_ptr<Comm> take();

 private:
  friend class Endpoint;
  std::mutex mutex_;
  std::shared_ptr<Comm> comm_;
  std::string error_;
};

class Endpoint {
 public:
  // Throws what Settings and find_devices throw, std::runtime_error without libcrypto.
  static Endpoint& instance();

  const std::vector<Device>& devices() const { return devices_; }
  // The carrier of the messages: "TCP over eth0 10.0.0.5:0".
  std::string description() const;
  const Settings& settings() const { return settings_; }
  // Of messages in their memory. Null: only memory of the host is offered.
  Gpus* gpus() const { return gpus_.get(); }
  // Whether the device's adapter reads and writes memory of GPUs, and takes dmabufs of it.
  bool reaches_gpus(int device) { return cuda_ != nullptr && fabric_->of(device)->why_no_gpus().empty(); }
  bool takes_dmabufs(int device) { return reaches_gpus(device) && fabric_->of(device)->limits().takes_dmabuf; }
  // The process's CUDA, where an adapter reaches GPUs; else null.
  const device::CudaProcess* cuda() const { return cuda_.get(); }
  // A communicator goes without the switch. NCCL goes on by its network, whatever CollNet's set-up returns (transport.cc,
  // ncclTransportCollNetCheck): where the switch is required, the network refuses everything from now on.
  void go_without_switch() { is_refusing_ = settings_.is_switch_required; }
  // Throws std::runtime_error where it refuses.
  void check_switch() const;
  // Whether a connection may be made again after it broke. Both ends answer alike. Not within a host: there is no link
  // that breaks, and the copy of what was sent would cost time.
  bool is_resumable(const transport::Fd& socket) const;
  // Throws std::system_error.
  std::shared_ptr<Listener> listen(int device, Handle& handle, Listener::Of of = Listener::Of::comms);
  // Also closes comms that it made and nobody took.
  void close(Listener& listener);
  // Throws std::runtime_error for a handle of another plugin or transport.
  std::shared_ptr<Connecting> connect(int device, const Handle& handle);
  // `count` connections of member `rank` to a listener of members, whose handle is this plugin's. Blocks. Throws
  // std::runtime_error.
  Connections join(const Handle& handle, int rank, int count, std::int64_t deadline_ns);
  // Closes it once everything has arrived, after kCloseNs at the latest.
  void close(const std::shared_ptr<Comm>& comm);
  // Makes the link's connections again when they break, until `forget`. peer: the handle of the other end.
  void watch(std::shared_ptr<Reconnectable> link, std::optional<Handle> peer);
  void forget(const Reconnectable& link);
  // Look for broken connections now. Takes no lock.
  void wake();

 private:
  friend class Listener;
  static constexpr int kMaxHandshakes = 256;
  static constexpr std::int64_t kHandshakeNs = 5'000'000'000;
  static constexpr std::int64_t kLeastNs = 250'000'000;  // before a handshake is dropped for another
  static constexpr std::int64_t kConnectNs = 30'000'000'000;
  static constexpr std::int64_t kCloseNs = 5'000'000'000;
  static constexpr std::int64_t kLookNs = 200'000'000;
  static constexpr std::int64_t kRetryNs = 100'000'000;
  static constexpr std::int64_t kAskNs = 1'000'000'000;  // for the other end to connect, before it is asked again
  static constexpr std::size_t kMaxArriving = 4096;      // comms of a listener

  struct Watched {
    std::shared_ptr<Reconnectable> link;
    std::optional<Handle> peer;       // nullopt: this end does not know it, and waits for new connections
    std::vector<bool> is_connecting;  // by rail
    std::int64_t close_by_ns = 0;     // 0: it is open
  };
  // Both ends of a connection may be in this process: one with several GPUs, or NCCL that tries a device.
  using Key = std::pair<Id, bool>;  // whether this end has dialled
  static Key key_of(const Reconnectable& link) { return {link.id(), link.has_dialled()}; }
  struct Handshake {
    int socket = -1;  // of its thread, which removes the entry first; -1: dropped
    std::int64_t begun_ns = 0;
  };
  using Handshakes = std::list<Handshake>;  // in order of arrival
  // Removes a handshake at its end.
  class EndOfHandshake;
  struct Port {
    int device = 0;
    transport::Fd socket;
  };

  Endpoint();
  void open_fabric();
  transport::Fd open_port(const Device& device) const;
  void accept_all();
  void accept_one(int port);
  void make_room();
  bool drop_oldest();
  void take_in(transport::Fd socket, const transport::Address& peer, Handshakes::iterator handshake);
  void look_at_all();
  void connect_all(Connecting& connecting, int device, const Handle& handle);
  Connections dial(const Handle& handle, Hello& hello, std::int64_t deadline_ns);
  transport::Fd connect_to(const transport::Address& peer, std::int64_t deadline_ns);
  std::optional<std::uint64_t> resume(const Hello& hello, std::shared_ptr<Reconnectable>& link,
                                      std::optional<Reconnectable::Broken>& broken);
  void look_at(const Watched& watched);
  void connect_again(const std::shared_ptr<Reconnectable>& link, int rail);
  void try_again(Reconnectable& link, int rail, const Reconnectable::Broken& broken, const Handle& peer);
  std::shared_ptr<Comm> make(Comm::Role role, int device, const Hello& hello, const transport::Address& peer,
                             Connections connections, std::optional<Handle> handle);
  auth::Secret key_of(const auth::Secret& of_handle) const;
  std::shared_ptr<Reconnectable> find(const Key& key);

  const Settings settings_;
  const std::vector<Device> devices_;
  std::optional<FabricPorts> fabric_;  // none: TCP
  std::shared_ptr<device::CudaProcess> cuda_;
  std::unique_ptr<Gpus> gpus_;
  auth::Secret secret_{};
  std::mutex mutex_;
  transport::Condition condition_;
  std::atomic<bool> is_due_ = false;
  std::atomic<bool> is_refusing_ = false;
  std::vector<Port> ports_;
  std::map<Id, std::shared_ptr<Listener>> listeners_;
  std::map<Key, Watched> links_;
  Handshakes handshakes_;
  transport::Condition handshake_ended_;
  transport::Fd ports_changed_;
};

}  // namespace netfold::nccl
