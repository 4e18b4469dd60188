// The port of a leaf switch's job to its parent: sums go out, and the parent's packets come in from its address alone.
#pragma once

#include <netfold/dataplane/data_plane.hpp>
#include <netfold/protocol/parent_sender.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/transport/datagrams.hpp>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace netfold::dataplane {

class ParentPort {
 public:
  // The state of one epoch. Allocates all memory.
  struct Session {
    Session(const protocol::SwitchJob& machine, const std::optional<ParentKeys>& keys, auth::Security security);

    protocol::ParentSender sender;
    std::optional<auth::PacketAuthenticator> sum_authenticator;
    std::optional<auth::PacketAuthenticator> result_authenticator;
    std::vector<std::byte> encrypted;  // the sums of one run, where packets are encrypted
  };

  ParentPort(std::unique_ptr<transport::Datagrams> port, transport::Datagrams::Peer parent)
      : port_(std::move(port)), parent_(parent) {}

  transport::Datagrams& port() { return *port_; }
  bool is_parent(transport::Datagrams::Peer source) const { return source == parent_; }
  transport::Datagrams::WaitHint wait_hint() { return port_->wait_hint(blocked_); }

  void begin(Session session) { session_ = std::move(session); }
  // After begin.
  Session& session() { return *session_; }
  const protocol::ParentSender* sender() const { return session_ ? &session_->sender : nullptr; }
  // Sends the sums that are due; returns true where wait_hint() has changed. After begin.
  bool flush(protocol::SwitchJob& machine);

 private:
  std::unique_ptr<transport::Datagrams> port_;
  transport::Datagrams::Peer parent_;
  std::optional<Session> session_;
  bool blocked_ = false;  // the port did not take all
};

}  // namespace netfold::dataplane
