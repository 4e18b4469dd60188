// Remote memory access: grants of memory that the peer may write to, and writes into the peer's grants.
//
// Segments cost a copy at either end. A large part of a message goes without a copy, where both callers know of the
// part by a common name. The owner, who receives, posts memory for the name. The grant tells the writer the memory's
// address, its key and a random number of 32 bits. The writer writes the part from its caller's memory, with the number
// as immediate data. It also sends a `written` segment with the small bytes before the part, and with the number. The
// segment can be read once both have come, in either order; so no order is assumed. A posted part is always written,
// never sent in segments too: the writer waits for the grant. That costs no more than the window, since the owner posts
// parts ahead.
//
//     owner: post_receive(name)  --grant: name, address, key, number-->            writer: put(name)
//            memory              <--write with the number------------------------- memory
//            bytes in order      <--segment: bytes before the part | number, length (free at the write's completion)
//
// Owner
//   grant      event                                            becomes      action
//   (none)     post_receive                                     open         register; tell the peer
//   open       the write's number arrives                       landed       release the registration; wake the driver
//   open       its `written` segment arrives, and the provider  landed       release the registration; wake the driver
//              orders messages behind writes
//   open       cancel is complete, or the endpoint was closed   revoked      release the registration
//   landed     the segment's bytes were read                    (forgotten)  -
//
// Writer
//   offer      event                                            becomes      action
//   (none)     grant message                                    offered      wake the driver
//   offered    put; the endpoint takes the write                in flight    send the `written` segment
//   offered    put; the endpoint refuses for now                offered      -
//   offered    cancel message                                   (forgotten)  reply with the number of writes begun
//   in flight  completion                                       (forgotten)  the caller has its memory back
//   in flight  completion with an error                         (forgotten)  the stream fails
//
// Cancelling. Before an operation reports its failure, its caller must have its memory back: a late write would change
// other values. So the owner revokes its grants once (`cancel`). The writer replies with the number of writes that it
// ever began, and begins none after that. The memory is the owner's once as many writes have landed. The peer's
// FinalCounts (fabric_pipe.hpp) hold the same number. Without that number within Mesh::kCancelNs, or from a peer that
// died, only StreamMux::force_close makes the memory safe: the adapter refuses writes to a closed endpoint's
// registrations. ShmNode::begin_use and windows on devices (netfold/torch/device/ipc.py) follow the same rule: users of
// memory are counted, and a revoke waits for them. Here a count of writes replaces the flag, since the network adapter
// of another host reads no flag before it writes.
//
// Memory of a GPU takes part only this way, whatever the part's length: nothing here reads or writes it. Its part is in
// place when the segment can be read, so a reader that names another place has broken the messages' order.
//
// Not used over several rails, since a write that was lost with its rail could still land; nor with providers that
// cannot write, or whose peers write by themselves (Limits::peers_write). Then all bytes go in segments.
#pragma once

#include <netfold/transport/fabric/sender.hpp>

namespace netfold::transport::fabric {

class RmaGrants {
 public:
  // Grants of one stream whose bytes were not read yet.
  static constexpr std::size_t kMaxGrants = 16;
  // The bytes before a part, in its segment.
  static constexpr std::size_t kMaxBeforeBytes = 64;
  static constexpr std::size_t kGrantsAMessage = 8;

  RmaGrants(MuxState& state, Sender& sender, RegistrationCache& cache)
      : state_(state), sender_(sender), cache_(cache) {}

  // Why no part is written; empty where large parts are. rma_min_bytes: 0 turns RMA off.
  std::string obstacle(std::size_t rma_min_bytes) const;
  bool uses_rma(std::size_t rma_min_bytes, std::size_t bytes) const;
  // As StreamMux::why_no_gpus.
  std::string gpu_obstacle() const;
  // As Pipe's.
  std::size_t gpu_part_bytes() const;
  // The size of a stream's buffer for grants.
  std::size_t message_bytes() const;

  // Owner. See Pipe::post_receive.
  bool post_receive(Stream& stream, std::uint64_t name, std::byte* into, std::size_t bytes, Pipe::GpuMemory* gpu);
  // Tells the peer of new grants.
  void send_grants(Stream& stream);
  // Finds the grant that a `written` segment names. False: there is no such grant, or another segment named it.
  bool attach_grant(Stream& stream, ReceiveBuffer& buffer);
  void handle_landed(std::uint32_t number);
  // The bytes of the grant and its segment were read.
  void handle_read(const Grant& grant);

  // Writer. See Pipe::put.
  std::size_t put(Stream& stream, std::span<const iovec> pieces, std::uint64_t name, Pipe::GpuMemory* gpu);
  void handle_grants(Stream& stream, std::span<const std::byte> entries);
  void handle_write_completed(RmaWrite& write);
  void handle_cancel(Stream& stream);

  // Revokes the stream's grants, once. True once no grant is open and no write is in flight.
  bool cancel(Stream& stream);
  void forget_grants_of(const Stream& stream);
  void handle_endpoint_closed();

 private:
  std::uint32_t random_number();
  RegistrationCache::Entry* acquire(Stream& stream, std::byte* data, std::size_t bytes, Pipe::GpuMemory* gpu);

  MuxState& state_;
  Sender& sender_;
  RegistrationCache& cache_;
  std::unordered_map<std::uint32_t, Grant> grants_;  // by number, of all streams
  std::vector<std::uint32_t> random_numbers_;        // drawn ahead, to save system calls
};

}  // namespace netfold::transport::fabric
