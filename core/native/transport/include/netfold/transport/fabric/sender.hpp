// The sending half of streams: segments, control messages and the choice of rails.
//
// A segment is copied behind a header into a registered buffer, numbered, and sent over the next working rail.
//
//   segment    event                                              becomes      action
//   (none)     send; the window and its buffer are free           waiting      copy, number, offer to the rail
//   waiting    the rail injects the message                       sent         -
//   waiting    the rail takes the message                         under way    -
//   waiting    the rail refuses for now                           waiting      offer again at the next progress
//   waiting    the rail refuses for good                          waiting      the rail fails; offer to another rail
//   under way  completion                                         sent         wake the driver
//   under way  completion with an error                           waiting      the rail fails; offer to another rail
//   under way  completion, and its rail failed meanwhile          waiting      offer to another rail
//   sent       its rail fails                                     waiting      offer to another rail
//   sent       a probe reply lacks it, kLostNs after it was sent  waiting      its rail fails; offer to another rail
//   sent       the peer reports that it was read                  (forgotten)  wake the driver
//
// Where the last rail fails, the stream fails with the provider's reason.
//
// Window. At most send_window segments are sent and not read by the peer; so the peer always has posted buffers for
// them. Every header reports how many segments this end has read. A *credit* is a header alone. It is due once half a
// window was read and nothing else was sent, and in reply to a probe.
//
// Rails. A rail may fail without an error, and a peer that reads late looks the same. So with several rails a sender
// that waits for a confirmation sends a *probe* every kProbeIntervalNs, over the rails in turn. The reply names the
// first missing segment. A segment that was sent long before is lost, and its rail has failed for this stream. All
// segments that this rail took and the peer has not read go again over another rail, since it is unknown which have
// arrived. Segments that are still under way follow at their completion: until then the provider owns their buffers.
#pragma once

#include <netfold/transport/fabric/stream.hpp>

namespace netfold::transport::fabric {

class Sender {
 public:
  static constexpr std::int64_t kProbeIntervalNs = 50'000'000;
  static constexpr std::int64_t kLostNs = 1'000'000'000;

  explicit Sender(MuxState& state) : state_(state) {}

  // Sends as many bytes as the window takes; returns their number.
  std::size_t send(Stream& stream, std::span<const iovec> pieces);
  // Numbers and sends the next segment, whose bytes lie in `buffer` behind the header. bytes: header included.
  void send_segment(Stream& stream, SendBuffer& buffer, std::size_t bytes, MessageType type);
  // Sends the control messages that are due.
  void send_due_control(Stream& stream);
  // Tries again what an endpoint refused for now.
  void retry(Stream& stream);
  // Sends probes where confirmations are overdue. Only with several rails.
  void probe_for_losses();

  // Offers a buffer to its rail. `never`: that rail has failed, and its other segments wait for another rail.
  Endpoint::Taken offer(SendBuffer& buffer);

  void handle_sent(SendBuffer& buffer);
  void handle_send_error(SendBuffer& buffer, const std::string& reason);
  // read: of a header from the peer.
  void handle_confirmation(Stream& stream, std::uint32_t read);
  void handle_probe_reply(Stream& stream, std::uint32_t first_missing);

 private:
  Endpoint::Taken send_control(Stream& stream, MessageType type);
  void send_waiting(Stream& stream);
  void fail_rail(Stream& stream, std::size_t rail, const std::string& reason);
  void send_again(Stream& stream, std::size_t rail);

  MuxState& state_;
};

}  // namespace netfold::transport::fabric
