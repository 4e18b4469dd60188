#include "endpoint.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <netfold/auth/hmac.hpp>
#include <netfold/auth/packet_authenticator.hpp>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "tuning.hpp"

namespace netfold::nccl {
namespace {

using transport::Address;
using transport::Fd;
using transport::now_ns;

// An exception that leaves a thread would end the process. False: the system gives no thread now.
template <class Work>
bool run_apart(Work work) {
  try {
    std::thread([work = std::move(work)] {
      try {
        work();
      } catch (const std::exception& error) {
        warn(error.what());
      }
    }).detach();
    return true;
  } catch (const std::system_error& error) {
    warn(std::string("no thread can be made: ") + error.what());
    return false;
  }
}

// The provider as a handle has it; all zeros for TCP.
decltype(Handle::fabric) fabric_of(const std::string& provider) {
  decltype(Handle::fabric) name{};
  std::copy_n(provider.begin(), std::min(provider.size(), name.size()), name.begin());
  return name;
}

std::string transport_of(const decltype(Handle::fabric)& name) {
  const std::string provider(name.begin(), std::ranges::find(name, '\0'));
  return provider.empty() ? "TCP" : "fabric:" + provider;
}

Handle handle_of(const Address& address, int streams, const Id& listener, const auth::Secret& secret) {
  Handle handle;
  const auto host = address.host();
  handle.family = host.size() == 4 ? 4 : 6;
  handle.streams = static_cast<std::uint8_t>(streams);
  handle.port = address.port();
  std::memcpy(handle.address.data(), host.data(), host.size());
  if (handle.family == 6) handle.scope = reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_scope_id;
  handle.listener = listener;
  handle.secret = secret;
  handle.tuning = tuning_checksum();
  return handle;
}

Address address_of(const Handle& handle) {
  Address address;
  if (handle.family == 4) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address.storage);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(handle.port);
    std::memcpy(&v4.sin_addr, handle.address.data(), 4);
    address.length = sizeof v4;
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address.storage);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(handle.port);
    v6.sin6_scope_id = handle.scope;
    std::memcpy(&v6.sin6_addr, handle.address.data(), 16);
    address.length = sizeof v6;
  }
  return address;
}

// The condition of a wait that ends with the first notification, whatever it is about.
struct Once {
  bool is_over = false;
  bool operator()() { return std::exchange(is_over, true); }
};

}  // namespace

void require_own(const Handle& handle) {
  if (handle.magic != Handle().magic) {
    throw std::runtime_error("the handle is not one of this plugin: every rank must use it");
  }
  if (handle.streams == 0) throw std::runtime_error("the handle asks for no connection, and is damaged");
}

std::shared_ptr<Comm> Listener::next() {
  const std::lock_guard lock(mutex_);
  if (ready_.empty()) return nullptr;
  auto comm = std::move(ready_.front());
  ready_.pop_front();
  return comm;
}

std::optional<Listener::Member> Listener::next_member(std::int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  if (!arrived_.wait_until(lock, deadline_ns, [this] { return !members_.empty(); })) return std::nullopt;
  std::optional<Member> member(std::move(members_.front()));
  members_.pop_front();
  return member;
}

std::shared_ptr<Comm> Connecting::take() {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) throw std::runtime_error(error_);
  return std::move(comm_);
}

Endpoint& Endpoint::instance() {
  static Endpoint* const endpoint = new Endpoint;
  return *endpoint;
}

Endpoint::Endpoint()
    : settings_(Settings::from_environment()),
      devices_(find_devices(settings_.interfaces)),
      ports_changed_(transport::make_event()) {
  if (!auth::unavailable_reason().empty()) throw std::runtime_error(auth::unavailable_reason());
  open_fabric();
  if (settings_.cuda == Cuda::staged) {
    try {
      gpus_ = std::make_unique<Gpus>();
    } catch (const std::runtime_error& error) {
      warn(std::string("NETFOLD_NCCL_CUDA=staged is not used, and NCCL copies itself: ") + error.what());
    }
  }
  fill_random(secret_);
  if (!run_apart([this] { accept_all(); }) || !run_apart([this] { look_at_all(); })) {
    throw std::runtime_error("the plugin needs two threads of its own");
  }
}

// Memory of GPUs is asked for only where there is CUDA.
void Endpoint::open_fabric() {
  const bool asks = settings_.cuda == Cuda::automatic || settings_.cuda == Cuda::direct;
  std::string why = settings_.fabric.empty()
                        ? "TCP goes through the host's memory; set NETFOLD_TRANSPORT=fabric:PROVIDER"
                        : std::string();
  if (asks && why.empty()) {
    try {
      cuda_ = device::CudaProcess::open("libcuda.so.1");
    } catch (const std::runtime_error& error) {
      why = error.what();
    }
  }
  if (!settings_.fabric.empty()) {
    using Wanted = transport::fabric::Gpus;
    fabric_.emplace(settings_, devices_, cuda_ != nullptr ? Wanted::wanted : Wanted::unused);
  }
  for (std::size_t device = 0; why.empty() && cuda_ != nullptr && device < devices_.size(); ++device) {
    const FabricPort port = fabric_->of(static_cast<int>(device));
    if (port->why_no_gpus().empty()) continue;
    why = "provider " + port->limits().provider + " on " + devices_[device].name + ": " + port->why_no_gpus();
  }
  if (why.empty()) return;
  if (settings_.cuda == Cuda::direct) {
    throw std::runtime_error("NETFOLD_NCCL_CUDA=direct cannot be used: " + why +
                             "; without it (auto) messages go through the host's memory");
  }
  if (cuda_ != nullptr) inform("messages in memory of GPUs go through the host's memory: " + why);
}

void Endpoint::check_switch() const {
  if (!is_refusing_) return;
  throw std::runtime_error("NCCL goes without the switch " +
                           settings_.switches.substr(0, settings_.switches.find('#')) +
                           ", which NETFOLD_NCCL_REQUIRE_SWITCH=1 requires; an earlier line says why");
}

std::string Endpoint::description() const {
  const std::string copies = gpus_ == nullptr ? "" : ", and copies messages in memory of GPUs";
  if (fabric_) return fabric_->description() + copies;
  std::string names;
  for (const Device& device : devices_) {
    names += (names.empty() ? "" : ", ") + device.name + " " + device.address.text();
  }
  return "TCP over " + names + copies;
}

// The handle's secret, mixed with that of NETFOLD_SECRET_FILE: then who reads what NCCL carries cannot connect.
auth::Secret Endpoint::key_of(const auth::Secret& of_handle) const {
  if (settings_.job_secret.empty()) return of_handle;
  return auth::hmac(std::as_bytes(std::span(settings_.job_secret)), of_handle);
}

std::shared_ptr<Listener> Endpoint::listen(int device, Handle& handle, Listener::Of of) {
  Id id;
  fill_random(id);
  auto listener = std::make_shared<Listener>(id, device, of);
  const std::lock_guard lock(mutex_);
  auto port = std::ranges::find(ports_, device, &Port::device);
  if (port == ports_.end()) {
    ports_.push_back({device, open_port(devices_.at(static_cast<std::size_t>(device)))});
    port = ports_.end() - 1;
    transport::signal(ports_changed_);
  }
  handle = handle_of(Address::local_of(port->socket.get()), settings_.streams, id, secret_);
  handle.fabric = fabric_of(settings_.fabric);
  handle.takes_gpus = reaches_gpus(device) ? 1 : 0;
  if (fabric_) handle.rma_min_bytes = static_cast<std::uint32_t>(fabric_->of(device)->rma_min_bytes());
  listeners_.emplace(id, listener);
  return listener;
}

// The first port of NETFOLD_PORTS that is free.
Fd Endpoint::open_port(const Device& device) const {
  for (int number = settings_.first_port; number <= settings_.last_port; ++number) {
    Address address = device.address;
    // The port is at the same place in addresses of both families.
    reinterpret_cast<sockaddr_in&>(address.storage).sin_port = htons(static_cast<std::uint16_t>(number));
    Fd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (socket) setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (socket && ::bind(socket.get(), address.get(), address.length) == 0 && ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
    if (errno != EADDRINUSE) transport::throw_errno("listen on " + address.text());
  }
  throw std::runtime_error("no port of NETFOLD_PORTS=" + std::to_string(settings_.first_port) + "-" +
                           std::to_string(settings_.last_port) + " is free on " + device.name +
                           "; every process of a host needs one");
}

void Endpoint::close(Listener& listener) {
  {
    const std::lock_guard lock(mutex_);
    listeners_.erase(listener.id());
  }
  {
    const std::lock_guard lock(listener.mutex_);
    listener.is_closed_ = true;
  }
  // NCCL will not ask for these any more.
  while (const auto comm = listener.next()) close(comm);
}

// --- accepting -------------------------------------------------------------------------------------------------------

class Endpoint::EndOfHandshake {
 public:
  EndOfHandshake(Endpoint& endpoint, Handshakes::iterator handshake) : endpoint_(&endpoint), handshake_(handshake) {}
  EndOfHandshake(const EndOfHandshake&) = delete;
  EndOfHandshake& operator=(const EndOfHandshake&) = delete;
  ~EndOfHandshake() { end(); }
  // Idempotent. From here on nothing but its owner closes the connection.
  void end() {
    if (endpoint_ == nullptr) return;
    const std::lock_guard lock(endpoint_->mutex_);
    endpoint_->handshakes_.erase(handshake_);
    endpoint_->handshake_ended_.notify_all();
    endpoint_ = nullptr;
  }

 private:
  Endpoint* endpoint_;
  Handshakes::iterator handshake_;
};

void Endpoint::accept_all() {
  for (;;) {
    std::vector<pollfd> fds{{ports_changed_.get(), POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      for (const Port& port : ports_) fds.push_back({port.socket.get(), POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), -1);
    transport::clear(ports_changed_);
    for (const pollfd& each : std::span(fds).subspan(1)) {
      if ((each.revents & POLLIN) == 0) continue;
      make_room();
      accept_one(each.fd);
    }
  }
}

// Waits until there is room for one more handshake. Meanwhile connections wait in the kernel's queue.
void Endpoint::make_room() {
  std::unique_lock lock(mutex_);
  while (handshakes_.size() >= kMaxHandshakes) {
    if (!drop_oldest()) {
      handshake_ended_.wait_until(lock, now_ns() + kLeastNs / 10, Once());
      continue;
    }
    handshake_ended_.wait_until(lock, now_ns() + kRetryNs, Once());
  }
}

// Whether the oldest handshake has had its time, and ends now. Its thread closes the connection. Precondition: mutex_.
bool Endpoint::drop_oldest() {
  const auto oldest = std::ranges::find_if(handshakes_, [](const Handshake& each) { return each.socket >= 0; });
  if (oldest == handshakes_.end() || now_ns() - oldest->begun_ns < kLeastNs) return false;
  ::shutdown(std::exchange(oldest->socket, -1), SHUT_RDWR);
  return true;
}

void Endpoint::accept_one(int port) {
  Address peer;
  peer.length = sizeof peer.storage;
  auto* address = reinterpret_cast<sockaddr*>(&peer.storage);
  const auto socket = std::make_shared<Fd>(::accept4(port, address, &peer.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!*socket) {
    if (transport::is_temporary(errno) || errno == ECONNABORTED) return;
    warn(std::string("a connection cannot be accepted: ") + std::strerror(errno));  // descriptors are short
    std::unique_lock lock(mutex_);
    drop_oldest();
    handshake_ended_.wait_until(lock, now_ns() + kRetryNs, Once());
    return;
  }
  Handshakes::iterator handshake;
  {
    const std::lock_guard lock(mutex_);
    handshake = handshakes_.insert(handshakes_.end(), {socket->get(), now_ns()});
  }
  const bool is_begun = run_apart([this, socket, peer, handshake] {
    try {
      take_in(std::move(*socket), peer, handshake);
    } catch (const std::exception& error) {
      inform("a connection from " + peer.text() + " was closed: " + error.what());
    }
  });
  if (!is_begun) EndOfHandshake(*this, handshake).end();
}

void Endpoint::take_in(Fd socket, const Address& peer, Handshakes::iterator handshake) {
  EndOfHandshake handshake_end(*this, handshake);  // before the socket is closed
  std::shared_ptr<Listener> listener;
  std::shared_ptr<Reconnectable> link;
  std::optional<Reconnectable::Broken> broken;
  const auto decide = [&](const Hello& hello) -> std::optional<std::uint64_t> {
    if (hello.security != static_cast<std::uint8_t>(settings_.security)) {
      throw std::runtime_error("its NETFOLD_SECURITY is not this rank's");
    }
    if (hello.of != Hello::Of::first) return resume(hello, link, broken);
    const std::lock_guard lock(mutex_);
    const auto found = listeners_.find(hello.listener);
    if (found == listeners_.end() || hello.rails == 0 || hello.rail >= hello.rails) return std::nullopt;
    listener = found->second;
    return 0;
  };
  Hello hello;
  const auto agreed = accept(socket.get(), hello, key_of(secret_), now_ns() + kHandshakeNs, decide);
  handshake_end.end();
  if (!agreed || hello.of == Hello::Of::asks) return;
  if (link != nullptr) {
    if (link->reconnect(hello.rail, broken->reconnects, std::move(socket), *agreed)) {
      inform("the connection from " + link->peer() + " was made again");
    }
    return;
  }
  const std::lock_guard lock(listener->mutex_);
  if (listener->is_closed_) return;
  if (listener->arriving_.size() >= kMaxArriving && !listener->arriving_.contains(hello.comm)) {
    throw std::runtime_error("too many connections arrive at once");
  }
  auto& arriving = listener->arriving_[hello.comm];
  arriving.connections.id = hello.comm;
  if (arriving.count > 0 && arriving.connections.sockets.size() != hello.rails) {
    throw std::runtime_error("its connections disagree on their number");
  }
  arriving.connections.sockets.resize(hello.rails);
  arriving.connections.secrets.resize(hello.rails);
  auto& place = arriving.connections.sockets.at(hello.rail);
  if (place) return;
  place = std::move(socket);
  arriving.connections.secrets[hello.rail] = agreed->secrets;
  if (++arriving.count < hello.rails) return;
  if (listener->of_ == Listener::Of::members) {
    listener->members_.push_back({static_cast<int>(hello.rank), std::move(arriving.connections)});
    listener->arrived_.notify_all();
  } else {
    listener->ready_.push_back(
        make(Comm::Role::receiver, listener->device(), hello, peer, std::move(arriving.connections), std::nullopt));
  }
  listener->arriving_.erase(hello.comm);
}

// Bytes received over the connection that the hello is about, which is broken now; nullopt: it will not be made again.
std::optional<std::uint64_t> Endpoint::resume(const Hello& hello, std::shared_ptr<Reconnectable>& link,
                                              std::optional<Reconnectable::Broken>& broken) {
  const bool is_asked = hello.of == Hello::Of::asks;
  link = find({hello.comm, is_asked});
  if (link == nullptr || hello.rail >= link->rails() || link->is_over()) return std::nullopt;
  broken = link->disconnect(hello.rail, is_asked ? hello.reconnects : Reconnectable::kAny);
  if (is_asked) {
    wake();
    return 0;
  }
  return broken ? std::optional(broken->received) : std::nullopt;
}

// --- connecting ------------------------------------------------------------------------------------------------------

std::shared_ptr<Connecting> Endpoint::connect(int device, const Handle& handle) {
  require_own(handle);
  if (const auto own = fabric_of(settings_.fabric); handle.fabric != own) {
    throw std::runtime_error("the rank at " + address_of(handle).text() + " goes over " + transport_of(handle.fabric) +
                             ", this rank over " + transport_of(own) + ": all need the same NETFOLD_TRANSPORT");
  }
  if (handle.tuning != tuning_checksum()) {
    throw std::runtime_error("the rank at " + address_of(handle).text() +
                             " has another table for NCCL's tuner than this one, so that they would run different "
                             "algorithms: set NETFOLD_NCCL_TUNER to the same file on all ranks, or on none");
  }
  auto connecting = std::make_shared<Connecting>();
  const bool is_begun = run_apart([this, connecting, device, handle] {
    try {
      connect_all(*connecting, device, handle);
    } catch (const std::exception& error) {
      const std::lock_guard lock(connecting->mutex_);
      connecting->error_ = "no connection to " + address_of(handle).text() + ": " + error.what();
    }
  });
  if (!is_begun) throw std::runtime_error("no connection to " + address_of(handle).text() + " can be begun");
  return connecting;
}

void Endpoint::connect_all(Connecting& connecting, int device, const Handle& handle) {
  const std::int64_t deadline_ns = now_ns() + kConnectNs;
  const Address peer = address_of(handle);
  Hello hello;
  hello.rails = handle.streams;
  hello.listener = handle.listener;
  if (fabric_) {
    hello.announces_always = handle.takes_gpus != 0 ? 1 : 0;
    hello.rma_min_bytes =
        static_cast<std::uint32_t>(rma_min_bytes_of(fabric_->of(device)->rma_min_bytes(), handle.rma_min_bytes));
  }
  Connections connections = dial(handle, hello, deadline_ns);
  auto comm = make(Comm::Role::sender, device, hello, peer, std::move(connections), handle);
  const std::lock_guard lock(connecting.mutex_);
  connecting.comm_ = std::move(comm);
}

Connections Endpoint::dial(const Handle& handle, Hello& hello, std::int64_t deadline_ns) {
  hello.security = static_cast<std::uint8_t>(settings_.security);
  fill_random(hello.comm);
  Connections connections{.id = hello.comm, .sockets = {}, .secrets = {}};
  for (; hello.rail < hello.rails; ++hello.rail) {
    Fd socket = connect_to(address_of(handle), deadline_ns);
    const auto agreed = initiate(socket.get(), hello, key_of(handle.secret), deadline_ns);
    if (!agreed) throw std::runtime_error("the other rank has closed its listener");
    connections.sockets.push_back(std::move(socket));
    connections.secrets.push_back(agreed->secrets);
  }
  return connections;
}

Connections Endpoint::join(const Handle& handle, int rank, int count, std::int64_t deadline_ns) {
  Hello hello;
  hello.rails = static_cast<std::uint8_t>(count);
  hello.listener = handle.listener;
  hello.rank = static_cast<std::uint32_t>(rank);
  return dial(handle, hello, deadline_ns);
}

Fd Endpoint::connect_to(const Address& peer, std::int64_t deadline_ns) {
  Fd socket(::socket(peer.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) transport::throw_errno("make a socket");
  if (::connect(socket.get(), peer.get(), peer.length) == 0) return socket;
  if (errno != EINPROGRESS) transport::throw_errno("connect");
  pollfd ready{socket.get(), POLLOUT, 0};
  const auto left_ms = std::max<std::int64_t>(0, (deadline_ns - now_ns()) / 1'000'000);
  int error = ETIMEDOUT;
  socklen_t length = sizeof error;
  if (::poll(&ready, 1, static_cast<int>(left_ms)) > 0) getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) throw std::system_error(error, std::generic_category(), "connect");
  return socket;
}

std::shared_ptr<Comm> Endpoint::make(Comm::Role role, int device, const Hello& hello, const Address& peer,
                                     Connections connections, std::optional<Handle> handle) {
  transport::fabric::FabricLane lane;
  if (fabric_) {
    lane.mux = fabric_->of(device);
    lane.doorbell = std::make_shared<transport::fabric::Doorbell>();
    lane.rma_min_bytes = hello.rma_min_bytes;
  }
  const bool resumable = is_resumable(connections.sockets.front());
  auto comm = std::make_shared<Comm>(role, hello.comm, peer.text(), std::move(connections), resumable, std::move(lane),
                                     hello.announces_always != 0, [this] { wake(); });
  watch(comm, std::move(handle));
  return comm;
}

bool Endpoint::is_resumable(const Fd& socket) const {
  if (settings_.reconnect_ns == 0 || settings_.is_transport_named) return settings_.reconnect_ns > 0;
  return Address::local_of(socket.get()).host() != Address::peer_of(socket.get()).host();
}

void Endpoint::watch(std::shared_ptr<Reconnectable> link, std::optional<Handle> peer) {
  const Key key = key_of(*link);
  const auto rails = static_cast<std::size_t>(link->rails());
  const std::lock_guard lock(mutex_);
  links_.emplace(key, Watched{std::move(link), std::move(peer), std::vector<bool>(rails), 0});
}

void Endpoint::forget(const Reconnectable& link) {
  const std::lock_guard lock(mutex_);
  links_.erase(key_of(link));
}

std::shared_ptr<Reconnectable> Endpoint::find(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto found = links_.find(key);
  return found == links_.end() || found->second.close_by_ns != 0 ? nullptr : found->second.link;
}

void Endpoint::close(const std::shared_ptr<Comm>& comm) {
  comm->leave();
  comm->release_memory();
  const std::lock_guard lock(mutex_);
  if (const auto found = links_.find(key_of(*comm)); found != links_.end())
    found->second.close_by_ns = now_ns() + kCloseNs;
  wake();
}

// --- connections that break ------------------------------------------------------------------------------------------

// Called under a comm's lock, so that it takes none. A thread that misses it looks kLookNs later.
void Endpoint::wake() {
  is_due_ = true;
  condition_.notify_all();
}

void Endpoint::look_at_all() {
  for (;;) {
    std::vector<Watched> all;
    {
      std::unique_lock lock(mutex_);
      condition_.wait_until(lock, now_ns() + kLookNs, [this] { return is_due_.load(); });
      is_due_ = false;
      for (const auto& [key, watched] : links_) all.push_back(watched);
    }
    for (const Watched& each : all) look_at(each);
  }
}

void Endpoint::look_at(const Watched& watched) {
  const std::shared_ptr<Reconnectable>& link = watched.link;
  if (watched.close_by_ns != 0) {
    if (link->has_arrived() || now_ns() >= watched.close_by_ns) forget(*link);
    return;
  }
  link->look();
  for (int rail = 0; rail < link->rails(); ++rail) {
    const auto broken = link->broken(rail);
    if (!broken) continue;
    if (now_ns() >= broken->since_ns + settings_.reconnect_ns) {
      link->give_up(rail, broken->reconnects, "no new connection came about within NETFOLD_RECONNECT_S");
    } else if (watched.peer && !watched.is_connecting[static_cast<std::size_t>(rail)]) {
      const std::lock_guard lock(mutex_);
      const auto found = links_.find(key_of(*link));
      if (found == links_.end()) continue;
      found->second.is_connecting[static_cast<std::size_t>(rail)] =
          run_apart([this, link, rail] { connect_again(link, rail); });
    }
  }
}

void Endpoint::connect_again(const std::shared_ptr<Reconnectable>& link, int rail) {
  Handle peer;
  {
    const std::lock_guard lock(mutex_);
    const auto found = links_.find(key_of(*link));
    if (found == links_.end()) return;
    peer = *found->second.peer;
  }
  inform("the connection to " + link->peer() + " broke, and is made again");
  while (const auto broken = link->broken(rail)) {
    if (now_ns() >= broken->since_ns + settings_.reconnect_ns || find(key_of(*link)) == nullptr) break;
    try {
      try_again(*link, rail, *broken, peer);
    } catch (const std::exception&) {  // the time decides
      std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
    }
  }
  const std::lock_guard lock(mutex_);
  const auto found = links_.find(key_of(*link));
  if (found != links_.end()) found->second.is_connecting[static_cast<std::size_t>(rail)] = false;
}

void Endpoint::try_again(Reconnectable& link, int rail, const Reconnectable::Broken& broken, const Handle& peer) {
  const std::int64_t deadline_ns = broken.since_ns + settings_.reconnect_ns;
  Hello hello;
  hello.of = link.has_dialled() ? Hello::Of::again : Hello::Of::asks;
  hello.rail = static_cast<std::uint8_t>(rail);
  hello.rails = static_cast<std::uint8_t>(link.rails());
  hello.security = static_cast<std::uint8_t>(settings_.security);
  hello.reconnects = static_cast<std::uint16_t>(broken.reconnects);
  hello.received = broken.received;
  hello.listener = peer.listener;
  hello.comm = link.id();
  Fd socket = connect_to(address_of(peer), deadline_ns);
  const auto agreed =
      initiate(socket.get(), hello, key_of(peer.secret), std::min(deadline_ns, now_ns() + kHandshakeNs));
  if (!agreed) {
    link.give_up(rail, broken.reconnects, "the other end has closed it");
  } else if (hello.of == Hello::Of::again) {
    if (link.reconnect(rail, broken.reconnects, std::move(socket), *agreed)) {
      inform("the connection to " + link.peer() + " was made again");
    }
  } else {
    const std::int64_t until_ns = std::min(deadline_ns, now_ns() + kAskNs);
    while (now_ns() < until_ns) {
      const auto now = link.broken(rail);
      if (!now || now->reconnects != broken.reconnects) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

}  // namespace netfold::nccl
