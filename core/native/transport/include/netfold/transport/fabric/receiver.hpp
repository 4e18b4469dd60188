// The receiving half of streams: posted buffers, the order of segments, and the bytes for readers.
//
// All buffers of a rail are posted alike, for messages of any stream. A message's tag names its stream, and the
// segment's number its place in the stream.
//
//   buffer     event                                              becomes    action
//   (free)     the rail takes the buffer                          posted     -
//   (free)     the rail refuses for now                           unposted   post again at the next progress
//   posted     malformed message, unknown tag or unknown grant    (free)     count it as rejected
//   posted     control message                                    (free)     pass it to Sender or RmaGrants
//   posted     segment outside the window, or one that is here    (free)     count it as repeated; send a credit
//   posted     any other segment                                  received   wake the driver if it is the next to read
//   posted     error: the message was too long                    (free)     count it as rejected
//   received   all its bytes were read                            (free)     send a credit if one is due
//
// A (free) buffer is posted at once. A `written` segment can be read once its granted memory was written, too.
// kMaxFailedReceives errors with no message between them mean that the endpoint has failed; then all streams fail.
#pragma once

#include <netfold/transport/fabric/rma_grants.hpp>
#include <netfold/transport/fabric/sender.hpp>

namespace netfold::transport::fabric {

class Receiver {
 public:
  static constexpr int kMaxFailedReceives = 64;

  Receiver(MuxState& state, Sender& sender, RmaGrants& grants) : state_(state), sender_(sender), grants_(grants) {}

  // Receives the bytes that are here, in order; returns their number. Those that the peer wrote to the front of `gpu` are
  // passed over there; all others are copied to `pieces`.
  std::size_t receive(Stream& stream, std::span<std::byte>& gpu, std::span<const iovec> pieces);
  void post(ReceiveBuffer& buffer);
  // Posts the buffers that a rail refused for now.
  void post_refused();
  bool has_unposted() const { return !unposted_.empty(); }

  void handle_received(ReceiveBuffer& buffer, std::size_t bytes, std::uint64_t tag);
  void handle_receive_error(ReceiveBuffer& buffer, const std::string& reason);
  void handle_endpoint_closed() { unposted_.clear(); }

 private:
  void handle_segment(Stream& stream, ReceiveBuffer& buffer, const MessageHeader& header);

  MuxState& state_;
  Sender& sender_;
  RmaGrants& grants_;
  std::vector<ReceiveBuffer*> unposted_;
  int failed_receives_ = 0;  // in succession
};

}  // namespace netfold::transport::fabric
