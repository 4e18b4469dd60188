#include <netfold/auth/hmac.hpp>
#include <netfold/control/membership.hpp>
#include <netfold/control/path_probe.hpp>
#include <netfold/control/switch_watch.hpp>
#include <netfold/protocol/packet.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <map>
#include <span>
#include <stdexcept>
#include <utility>

#include "control_stream.hpp"
#include "messages.hpp"
#include "packet_keys.hpp"

namespace netfold::control {
namespace {

using transport::now_ns;
using transport::UdpSocket;

// Added to a deadline: the switch reports a passed deadline itself, and its reason is the better one.
constexpr std::int64_t kGraceNs = 2'000'000'000;
constexpr std::int64_t kMaxTimeoutNs = 86'400'000'000'000;
constexpr std::int64_t kLeaveNs = 1'000'000'000;
constexpr std::size_t kMaxReason = 400;
constexpr std::size_t kMaxWindowBytes = 64 << 20;
// As in netfold/switch_protocol/control_messages.py and data_path.py: bytes of values in a packet, longest first; how
// long each but the last is tried, and the last one.
constexpr std::array<std::size_t, 3> kPayloads = {8880, 1408, 1152};
constexpr std::int64_t kProbeNs = 120'000'000;
constexpr std::int64_t kLastProbeNs = 5'000'000'000;
constexpr const char* kHardware = "hardware";

constexpr std::uint64_t kMost32 = 0xffffffff, kMost64 = ~std::uint64_t{0};

// Packets do not pass. The text is a clause after the switch's name.
struct PathError : ReplyError {
  using ReplyError::ReplyError;
};

transport::Address with_port(transport::Address address, std::uint16_t port) {
  auto* const family = &address.storage;
  if (family->ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(family)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(family)->sin_port = htons(port);
  }
  return address;
}

Membership::Event lost(const std::string& endpoint, const std::string& why) {
  return {Membership::Event::Kind::lost, "the switch at " + endpoint + " is gone (" + why + ")", -1};
}

bool has_tree(const JoinRequest& request) { return !std::holds_alternative<std::monostate>(request.tree.data); }

void check_request(const JoinRequest& request) {
  const auto is_hexadecimal = [](char each) { return std::isxdigit(static_cast<unsigned char>(each)) != 0; };
  if (request.job.size() < 16 || request.job.size() > 128 || !std::ranges::all_of(request.job, is_hexadecimal)) {
    throw std::invalid_argument("a job is named by 16 to 128 hexadecimal digits");
  }
  const std::size_t most = has_tree(request) ? kMaxJobWorkers : protocol::kMaxWorkers;
  if (std::ranges::count(request.ranks, request.rank) != 1 || request.ranks.size() > most) {
    throw std::invalid_argument("a job has 1 to " + std::to_string(most) + " ranks, and this one among them, not " +
                                std::to_string(request.ranks.size()));
  }
  if (request.timeout_ns <= 0 || request.timeout_ns > kMaxTimeoutNs) {
    throw std::invalid_argument("a join takes more than 0 s and up to a day, not " + seconds(request.timeout_ns));
  }
  if (request.window_bytes == 0) throw std::invalid_argument("a window has at least 1 byte");
}

std::uint64_t generation_of(const std::string& job) {
  std::uint64_t generation = 0;
  std::from_chars(job.data(), job.data() + 16, generation, 16);
  return std::max<std::uint64_t>(generation, 1);
}

// The text of a switch for people goes on as it came; everything else that it says is checked.
struct Admission {
  explicit Admission(const Value& message, std::size_t workers)
      : job(static_cast<std::uint32_t>(unsigned_of(message, "job_id", kMost32))),
        incarnation(static_cast<std::uint32_t>(unsigned_of(message, "incarnation", kMost32))),
        worker(static_cast<std::uint16_t>(unsigned_of(message, "worker", workers - 1))),
        nonce(unsigned_of(message, "nonce", kMost64)),
        port(static_cast<std::uint16_t>(unsigned_of(message, "port", 0xffff))),
        has_keys(message.find("secret") != nullptr),
        encrypts(flag_of(message, "encrypt")),
        hardware(message.find("profile") != nullptr && text_of(message, "profile") == kHardware) {
    if (has_keys) {
      secret = bytes_of(message, "secret");
      result_secret = bytes_of(message, "result_secret");
    }
    if (hardware) {
      payload_bytes = unsigned_of(message, "payload_bytes", protocol::kMaxPayloadBytes);
      if (payload_bytes == 0 || payload_bytes % 8 != 0) {
        throw ProtocolError("packets of " + std::to_string(payload_bytes) + " bytes of values");
      }
    }
  }

  std::uint32_t job;
  std::uint32_t incarnation;
  std::uint16_t worker;
  std::uint64_t nonce;
  std::uint16_t port;
  bool has_keys;
  bool encrypts;
  bool hardware;
  std::size_t payload_bytes = 0;  // of the hardware profile; else 0
  Value::Bytes secret, result_secret;

  std::optional<auth::Key> key_of_hellos() const {
    return has_keys ? std::optional(hello_key(secret, job, worker)) : std::nullopt;
  }
};

// Throws ReplyError where packets would lack the promised protection, or this host cannot give it.
void check_protection(const Admission& admission, bool is_pinned, bool must_encrypt) {
  if (is_pinned && !admission.has_keys) throw ReplyError("speaks TLS and gave no keys for packets");
  if (admission.has_keys && !auth::unavailable_reason().empty()) {
    throw ReplyError("requires packet authentication, which is unavailable on this host: " +
                     auth::unavailable_reason());
  }
  if (must_encrypt && !(admission.has_keys && admission.encrypts)) {
    throw ReplyError("does not encrypt packets, and the job requires it (NETFOLD_SECURITY=encrypt): upgrade it");
  }
}

// Returns the longest packet's bytes of values that the switch returned. Throws PathError.
std::size_t probe_path(UdpSocket& port, transport::Datagrams::Peer to, const Admission& admission,
                       std::int64_t deadline_ns) {
  std::vector<std::size_t> candidates(kPayloads.begin(), kPayloads.end());
  if (admission.hardware) candidates = {admission.payload_bytes};
  for (const std::size_t payload : candidates) {
    const std::int64_t tried_ns = payload == candidates.back() ? kLastProbeNs : kProbeNs;
    const std::int64_t left_ns = std::max<std::int64_t>(0, deadline_ns - now_ns());
    const Hello hello{admission.job, admission.incarnation, admission.worker, admission.nonce,
                      payload + protocol::kHeaderBytes};
    if (exchange_hello(port, to, hello, admission.key_of_hellos(), std::min(tried_ns, left_ns))) return payload;
  }
  const std::string& error = port.counters().last_send_error;
  throw PathError("is reached by TCP, but no UDP packet came back from its data port " +
                  std::to_string(admission.port) +
                  ": a firewall may drop UDP, or an address translation change its port" +
                  (error.empty() ? "" : " (the last packet did not leave: " + error + ")"));
}

// As credential_of in netfold/switch_protocol/control_messages.py: of use at the switch with this certificate alone.
Value::Bytes credential_of(const std::string& token, const std::string& fingerprint) {
  const std::string data = "netfold switch credential " + fingerprint;
  const auth::Secret credential = auth::hmac(std::as_bytes(std::span(token)), std::as_bytes(std::span(data)));
  return {credential.begin(), credential.end()};
}

// The first message of a connection: with the version, and a credential if there is a token.
Value::Map first_message(const char* type, const JoinRequest& request) {
  Value::Map message{{"version", kControlProtocolVersion}, {"type", type}};
  if (!request.token.empty()) message.emplace_back("credential", credential_of(request.token, request.to.fingerprint));
  return message;
}

void require_keys(const JoinRequest& request, const SwitchAddress& to) {
  if (!to.fingerprint.empty() || request.security == auth::Security::none) return;
  throw std::runtime_error("rank " + std::to_string(request.rank) + ": the switch at " + to.endpoint() +
                           " has no keys, and NETFOLD_SECURITY=" +
                           (request.security == auth::Security::encrypt ? "encrypt" : "authenticate") +
                           "; start it with --token-file, and name it with its fingerprint");
}

// Runs `ask(deadline_ns)`, which talks to the switch, and explains its errors.
template <class Ask>
auto explained(const JoinRequest& request, Ask ask) {
  const std::int64_t deadline_ns = now_ns() + request.timeout_ns;
  const std::string name =
      "rank " + std::to_string(request.rank) + ": the switch at " + request.to.endpoint() + " (NETFOLD_SWITCH)";
  const bool is_pinned = !request.to.fingerprint.empty();
  require_keys(request, request.to);
  if (!is_pinned && !request.token.empty()) {
    throw std::runtime_error(
        name +
        ": NETFOLD_TOKEN_FILE is set, and NETFOLD_SWITCH has no fingerprint: no certificate proves which "
        "switch answers there; set NETFOLD_SWITCH to all of what the switch says when it "
        "starts, host:port#fingerprint");
  }
  const std::string missing = is_pinned ? auth::unavailable_reason() + tls_unavailable_reason() : "";
  if (!missing.empty()) {
    throw std::runtime_error(name + " wants packets to be authenticated, and this host cannot: " + missing +
                             "; without it only a switch with --open can be joined");
  }
  try {
    return ask(deadline_ns);
  } catch (const ConnectError& error) {
    throw std::runtime_error(name + error.what());
  } catch (const Unanswered&) {
    throw std::runtime_error(name + " did not answer within " + seconds(request.timeout_ns) +
                             "; check the address, and whether a firewall drops what this host sends there");
  } catch (const TimedOut&) {
    const bool alone = request.ranks.size() == 1;
    throw std::runtime_error(name + " did not answer within " + seconds(request.timeout_ns) +
                             ": either it is no netfold switch, or " +
                             (alone ? "it is stopped; check the address"
                                    : "not all of the " + std::to_string(request.ranks.size()) +
                                          " ranks joined; check the address, and that every rank of the job started"));
  } catch (const ReplyError& error) {
    throw std::runtime_error(name + " " + error.what());
  } catch (const std::exception& error) {
    throw std::runtime_error(
        name + " is no netfold switch, or it stopped while this rank joined: " + error.what() + "; check the address" +
        (is_pinned ? "" : "; one with --token-file speaks TLS: NETFOLD_SWITCH=host:port#fingerprint"));
  }
}

}  // namespace

PathToRoot query_path_to_root(const JoinRequest& request) {
  const std::string& fingerprint = request.to.fingerprint;
  const std::string endpoint = request.to.endpoint() + (fingerprint.empty() ? "" : "#" + fingerprint);
  const PathToRoot path = explained(request, [&](std::int64_t deadline_ns) {
    ControlStream stream(request.to, deadline_ns);
    Value::Map message = first_message("path", request);
    message.emplace_back("below", Value::Array{});
    stream.send(message, deadline_ns + kGraceNs);
    const Value reply = stream.receive(deadline_ns + kGraceNs);
    check_reply(reply, "path", true);
    return PathToRoot(reply, endpoint);
  });
  for (const std::string& each : path.endpoints) require_keys(request, SwitchAddress::parse(each));
  return path;
}

struct Membership::Connection {
  Connection(const JoinRequest& request, std::int64_t deadline_ns)
      : endpoint(request.to.endpoint()),
        rank(request.rank),
        ranks(request.ranks),
        stream(request.to, deadline_ns),
        watch(request.rank, now_ns()) {}

  Value expect(std::string_view kind, std::int64_t deadline_ns, bool is_first) {
    Value message = stream.receive(deadline_ns + kGraceNs);
    check_reply(message, kind, is_first);
    return message;
  }

  // A switch that has ended the job answers none of its packets, and has sent the reason as a refusal. Throws it.
  void check_refusal() {
    std::optional<Value> message;
    try {
      message = stream.try_receive();
    } catch (const std::exception&) {
      return;
    }
    if (message && text_of(*message, "type") == "refused") check_reply(*message, "refused", false);
  }

  std::string endpoint;
  int rank;
  std::vector<int> ranks;  // of the job
  ControlStream stream;
  SwitchWatch watch;
  std::uint64_t serials = 0;
  struct Query {
    std::uint64_t serial = 0;
    bool of_chunk = false;
  };
  std::optional<Query> open_query;
  std::map<int, Departure> left;  // by rank
};

Membership::Membership(std::unique_ptr<Connection> connection) : connection_(std::move(connection)) {}
Membership::~Membership() = default;

std::unique_ptr<Membership> Membership::join(const JoinRequest& request) {
  check_request(request);
  return explained(request, [&](std::int64_t deadline_ns) {
    std::unique_ptr<Membership> joined(new Membership(std::make_unique<Connection>(request, deadline_ns)));
    joined->admit(request, deadline_ns);
    return joined;
  });
}

void Membership::admit(const JoinRequest& request, std::int64_t deadline_ns) {
  ControlStream& stream = connection_->stream;
  authenticated_ = stream.is_authenticated();
  // Packets leave from the control connection's address: the switch accepts them from no other host.
  auto port = std::make_unique<UdpSocket>(with_port(stream.local(), 0), 4 * request.window_bytes);
  const bool must_encrypt = request.security == auth::Security::encrypt;
  Value::Map join = first_message("join", request);
  join.insert(join.end(), {{"job", request.job},
                           {"name", request.name},
                           {"rank", request.rank},
                           {"window_bytes", request.window_bytes},
                           {"timeout_s", static_cast<double>(request.timeout_ns) / 1e9},
                           {"profiles", Value::Array{kHardware}},
                           {"port", port->local().port()}});
  if (has_tree(request)) {
    join.emplace_back("tree", request.tree);
  } else {
    join.emplace_back("ranks", Value::Array(request.ranks.begin(), request.ranks.end()));
  }
  if (must_encrypt) join.emplace_back("encrypt", true);
  stream.send(join, deadline_ns + kGraceNs);

  const Admission admission(connection_->expect("admitted", deadline_ns, true), request.ranks.size());
  check_protection(admission, authenticated_, must_encrypt);
  encrypts_ = admission.encrypts;
  hardware_ = admission.hardware;
  const auto to = port->add(with_port(stream.peer(), admission.port));
  std::size_t probed_bytes = 0;
  try {
    probed_bytes = probe_path(*port, to, admission, deadline_ns);
  } catch (const PathError&) {
    connection_->check_refusal();
    throw;
  }
  stream.send(Value::Map{{"type", "ready"}, {"payload_bytes", probed_bytes}}, deadline_ns + kGraceNs);

  const Value start = connection_->expect("start", deadline_ns, false);
  hardware_ |= text_of(start, "profile") == kHardware;
  const auto epoch = static_cast<std::uint32_t>(unsigned_of(start, "epoch", kMost32));
  payload_bytes_ = unsigned_of(start, "payload_bytes", probed_bytes);
  if (payload_bytes_ == 0 || payload_bytes_ % 8 != 0) throw ProtocolError("it starts packets without values");
  // The channel keeps a window of results. The job's first rank chose the window, which may be larger than this one's.
  const std::size_t most_chunks =
      std::max(kMaxWindowBytes, request.window_bytes) / (payload_bytes_ + protocol::kHeaderBytes);
  window_ = static_cast<std::uint32_t>(
      unsigned_of(start, "window", std::min<std::uint64_t>(most_chunks, protocol::kMaxWindow)));
  if (window_ == 0) throw ProtocolError("it grants a window without chunks");
  window_shortfall_ = text_of(start, "window_shortfall");
  std::optional<collective::ChannelKeys> keys;
  if (admission.has_keys) {
    keys = {contribution_key(admission.secret, admission.job, epoch, admission.worker),
            result_key(admission.result_secret, admission.job, epoch),
            encrypts_ ? auth::Security::encrypt : auth::Security::authenticate};
  }
  const protocol::WorkerConfig config{admission.job,
                                      epoch,
                                      admission.incarnation,
                                      admission.worker,
                                      static_cast<std::uint16_t>(request.ranks.size()),
                                      window_,
                                      static_cast<std::uint32_t>(payload_bytes_)};
  channel_ = std::make_unique<collective::Channel>(generation_of(request.job), config, keys, request.ranks,
                                                   request.rank, std::move(port), to);
}

std::unique_ptr<collective::Channel> Membership::take_channel() {
  const std::lock_guard lock(mutex_);
  return std::move(channel_);
}

std::optional<Membership::Event> Membership::poll(std::int64_t now_ns, const collective::Channel& channel) {
  if (now_ns < next_look_ns_.load(std::memory_order_relaxed)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (connection_ == nullptr) return std::nullopt;
  if (!event_) {
    event_ = look(now_ns, channel);
    next_look_ns_.store(event_ ? 0 : now_ns + kLookNs, std::memory_order_relaxed);
  }
  return event_;
}

std::optional<Membership::Event> Membership::look(std::int64_t now_ns, const collective::Channel& channel) {
  Connection& connection = *connection_;
  if (auto event = read()) return event;
  if (!channel.path_error().empty()) return lost(connection.endpoint, channel.path_error());
  SwitchWatch& watch = connection.watch;
  const protocol::Worker& machine = channel.machine();
  const auto awaited = machine.idle() ? std::nullopt : std::optional(machine.oldest_outstanding());
  const auto action = watch.poll(now_ns, awaited, !connection.left.empty());
  if (const auto* gone = std::get_if<SwitchWatch::Lost>(&action)) {
    const std::string& error = channel.send_error();
    return lost(connection.endpoint, gone->why + (error.empty() ? "" : " (" + error + ")"));
  }
  if (const auto* query = std::get_if<SwitchWatch::Query>(&action)) {
    connection.open_query = {++connection.serials, query->chunk.has_value()};
    Value::Map message{{"type", query->chunk ? "stragglers" : "alive"}, {"serial", connection.serials}};
    if (query->chunk) message.emplace_back("chunk", *query->chunk);
    try {
      connection.stream.post(message);
    } catch (const std::exception&) {
      // Then no reply comes, which the watch notices, or the end of the connection is read.
    }
  }
  for (const int rank : watch.stragglers()) {
    const auto found = connection.left.find(rank);
    if (found == connection.left.end()) continue;
    const auto& [reason, fault] = found->second;
    return Event{
        Event::Kind::left,
        "rank " + std::to_string(rank) + " left while its contribution was needed: " + reason + "; see its own output",
        fault >= 0 && fault != connection.rank ? fault : rank};
  }
  return std::nullopt;
}

std::optional<Membership::Event> Membership::read() {
  constexpr int kMaxMessages = 64;
  Connection& connection = *connection_;
  try {
    for (int i = 0; i < kMaxMessages; ++i) {
      const auto message = connection.stream.try_receive();
      if (!message) return std::nullopt;
      const std::string type = text_of(*message, "type");
      if (type == "stragglers" || type == "alive") {
        auto& query = connection.open_query;
        if (!query || unsigned_of(*message, "serial", kMost64) != query->serial) continue;
        std::optional<std::vector<int>> missing;
        if (query->of_chunk && !flag_of(*message, "unknown")) missing = ranks_of(*message);
        query.reset();
        connection.watch.answer(missing);
      } else if (type == "left") {
        for (const int rank : ranks_of(*message)) {
          if (std::ranges::find(connection.ranks, rank) == connection.ranks.end()) continue;
          connection.left[rank] = {text_of(*message, "reason"), fault_of(*message)};
        }
      } else if (type == "refused") {
        // The lost switch may be another one of the tree.
        const std::string other = text_of(*message, "switch");
        return lost(other.empty() ? connection.endpoint : other, text_of(*message, "reason"));
      }
    }
    return std::nullopt;
  } catch (const std::exception&) {
    return lost(connection.endpoint, "it closed the connection");
  }
}

std::vector<int> Membership::stragglers() const {
  const std::lock_guard lock(mutex_);
  return connection_ == nullptr ? std::vector<int>{} : connection_->watch.stragglers();
}

void Membership::leave(std::string_view reason, int fault) {
  const std::lock_guard lock(mutex_);
  if (connection_ == nullptr) return;
  try {
    const Value::Map message{
        {"type", "leave"}, {"reason", std::string(reason.substr(0, kMaxReason))}, {"fault", fault}};
    connection_->stream.send(message, now_ns() + kLeaveNs);
    connection_->stream.shut_down();
  } catch (const std::exception&) {
    // The switch then learns it from the end of the connection.
  }
  connection_.reset();
}

}  // namespace netfold::control
