// Matches messages to receives, by MPI's rules.
//
// A receive names a tag, and a source or any source. Among messages with the same source and tag, the first that was
// sent matches the first receive that was posted. Matching uses frame headers in the order of the stream, so an
// announced message keeps its position among eager messages.
#pragma once

#include <netfold/collective/call.hpp>
#include <netfold/transport/pipe.hpp>

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace netfold::collective {

// The header of every frame between two ranks (point_to_point.hpp).
struct FrameHeader {
  enum class Type : std::uint8_t { eager = 1, announce = 2, accept = 3, chunk = 4, credit = 5, abort = 6 };
  static constexpr std::uint32_t kMagic = 0x4e465031;
  std::uint32_t magic = kMagic;
  Type type = Type::eager;
  Element element = {};
  std::uint8_t failure = 0;  // of an abort: Failure::Kind
  std::uint8_t orderly = 0;  // of an abort
  std::int32_t tag = 0;      // of an abort: the rank at fault, -1 if unknown
  // Of an announce, not 0 where the sender's memory is a GPU's: the longest chunk that it can write. Of an accept, not 0
  // where the memory of either end is: the length of the chunks, all of which go by RMA.
  std::uint32_t gpu_chunk_bytes = 0;
  std::uint64_t id = 0;     // of the message, given by its sender
  std::uint64_t bytes = 0;  // of the message; of a chunk, credit or abort: of the frame itself
};
static_assert(sizeof(FrameHeader) == 32);

class MessageMatcher {
 public:
  using Ticket = std::uint64_t;  // the caller's name for a call; not 0

  struct Receive {
    Ticket ticket = 0;
    int source = kAnySource;
    int tag = 0;
    Element element = {};
    bool accepts_less = false;
    std::byte* data = nullptr;
    std::size_t bytes = 0;     // of the output; once a message is accepted, of the message
    std::size_t received = 0;  // bytes
    std::size_t posted = 0;    // bytes that are posted for RMA, or need no posting
    transport::Pipe::RegistrationLease lease;
    transport::Pipe::GpuLease gpu;  // that `data` is in; null: the host's memory
    std::size_t chunk_bytes = 0;    // of an accepted message
    bool must_use_rma = false;      // it is from or into memory of a GPU
    std::uint64_t order = 0;
  };
  // A message that arrived before its receive was posted. It has no values if it is only announced.
  struct Message {
    FrameHeader header;
    std::vector<std::byte> values;
    std::uint64_t order = 0;
  };

  // Posts a receive for which there is no kept message.
  void post(Receive receive);
  // Removes and returns the receive that a message matches; nullopt where none is posted.
  std::optional<Receive> take_posted(int source, int tag);
  // Removes a posted receive of a named source. False: it is not posted.
  bool withdraw(int source, int tag, Ticket ticket);
  bool has_any_source() const { return posted_to_any_ > 0; }
  // A posted receive from exactly that source, which may be kAnySource; 0 where there is none.
  Ticket posted_from(int source) const;

  // Keeps a message that matches no posted receive. The reference is valid until the message is dropped.
  Message& keep(int source, const FrameHeader& header, std::size_t value_bytes);
  // The source of the first kept message that matches a receive.
  std::optional<int> source_of_kept(int source, int tag) const;
  Message& kept(int source, int tag) { return kept_.at({tag, source}).front(); }
  void drop_kept(int source, int tag);
  // The kept messages that share the receive's source or tag, up to four: "rank 1 with tag 8, from rank 2 with tag 7".
  // A wrong tag or source is the usual reason why a receive waits.
  std::string similar_kept(int source, int tag) const;

 private:
  using Key = std::pair<int, int>;  // tag, source: a tag's messages are adjacent, ordered by source

  std::map<Key, std::deque<Receive>> posted_;
  std::map<Key, std::deque<Message>> kept_;
  // The source of the first message of each queue in kept_, by tag and order: a receive from any source takes the first.
  using ByOrder = std::pair<int, std::uint64_t>;
  std::map<ByOrder, int> first_kept_;
  std::size_t posted_to_any_ = 0;
  std::uint64_t order_ = 0;
};

}  // namespace netfold::collective
