// What collectives among ranks that share memory have in common: posts, streams, and the watch over the others.
//
// Every rank posts what it is about to do, with the header that messages carry between hosts: who called something
// else is heard of before a wrong value is read. With few bytes the data stand in the post. What is longer goes round
// by round through a stream of slots, several rounds in flight, so that nearly all copies stay in the caches; unless
// it lies in memory that the others can map (transport/shm/shm_registry.hpp), or they may read this process's
// (transport/shm/peer_memory.hpp): then the post refers to it, and they read it where it is.
//
// A post's tensors are exported until every rank that needs them is through with them, or their owner gives up. Each
// chunk is read or written inside a use of that lease (ShmNode::begin_use); a rank that gives up revokes the lease
// and waits for the uses that are under way before its user has the buffer back.
//
// A post's place and a stream's slots are used again once every reader has said that it is through with them; so a
// rank can be ahead of the others by a few calls, and of its readers by the slots of its stream.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/transport/shm/shm_node.hpp>

namespace netfold::collective {

class ShmCollective : public Algorithm {
 public:
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 protected:
  using Node = transport::ShmNode;
  using Stream = Node::Stream Node::Segment::*;
  // Borrows all three for its life. Positions in the node are indices of the call's buffers and its root.
  ShmCollective(const Call& call, transport::Mesh& mesh, Node& node);

  static constexpr std::size_t kLine = 64;
  static std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }
  // What a post needs for the table and the call's inputs behind it, each at the start of a line.
  std::size_t posted_inputs_bytes() const;
  // Rounds in which the widest of the call's inputs goes, where each has `part_bytes` of a slot.
  std::uint32_t rounds_of_inputs(std::size_t part_bytes) const;

  // Position whose post must be read before anything else.
  virtual bool needs_post(int position) const = 0;
  virtual void write_post(std::byte* data) = 0;
  // What the header of `position`'s post must say in `bytes`; and, of calls with a buffer for each rank, what its
  // table must say that it has for this rank.
  virtual std::uint64_t expected_bytes(int position) const = 0;
  // Once all posts are read. Does a bounded amount of work; false when there was nothing to do.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  virtual bool waits_for(int position) const = 0;
  // Whether `reader` takes what this rank puts into a stream.
  virtual bool reads(Stream stream, int reader) const = 0;

  bool is_posted() const { return posted_; }
  // Compares what has been posted of this call so far, for who does not wait for posts.
  void check_posts();
  // Whether the others are still there; fills failure_. At most once a millisecond.
  void check_peers(std::int64_t now_ns);
  void wait_to_look(WaitSet& set) const;
  bool has_table() const;
  std::size_t table_bytes() const { return has_table() ? static_cast<std::size_t>(size_) * sizeof(std::uint64_t) : 0; }
  void write_table(std::byte* data) const;
  const std::byte* post_data(int position) const { return node_.post(position, number_).data; }

  // Refers to `buffers` behind the table of a post that is being written; or does not, where they are not all shared.
  // `stream`: who reads that reads them.
  void refer(std::byte* data, std::span<const Buffer> buffers, Stream stream);
  // The same by their addresses here, for those who read this process's memory.
  void refer_by_address(std::byte* data, std::span<const Buffer> buffers);
  // Buffer `index` that the post of `position` refers to, in our memory; fills `failure_` where it cannot be mapped.
  std::byte* referred(int position, std::size_t index, std::size_t bytes);
  std::uint64_t referred_address(int position, std::size_t index) const;
  // The lease of what `position` refers to; false, with `failure_`, where that rank has left. Ends with node_.end_use.
  bool begin_use(int position);
  bool begin_use_of_all();
  // In place of what `position` refers to, its slots; and whether it wants ours.
  void ask_for_slots(Stream stream, int position);
  bool is_asked_for_slots(Stream stream, int position) const;
  // Of a rank whose connection is closed, or whose process has ended.
  void lose(int position);

  std::uint64_t tag(std::uint32_t rounds) const { return (number_ << 24) + rounds; }
  // How many rounds of this call `position` has published.
  std::uint32_t published(Stream stream, int position) const;
  bool slot_is_free(Stream stream, std::uint32_t round) const;
  std::byte* slot(Stream stream, int position, std::uint32_t round) const;
  void publish(Stream stream, std::uint32_t rounds);
  void take(Stream stream, int position, std::uint32_t rounds);

  enum class Refers : std::uint32_t { not_at_all = 0, to_regions = 1, to_addresses = 2 };
  struct Announcement {
    MessageHeader header;
    std::uint32_t rounds = 0;  // of the stream; 0: the data stand in the post
    Refers refers = Refers::not_at_all;
  };
  static_assert(sizeof(Announcement) == Node::kAnnouncementBytes);

  const Call& call_;
  transport::Mesh& mesh_;
  Node& node_;
  const int self_;
  const int size_;
  Announcement mine_;
  std::vector<Announcement> theirs_;  // by position, once read

 private:
  struct Reference {
    std::uint64_t region = 0;  // 0: at an address
    std::uint64_t offset = 0;
  };
  Reference reference(int position, std::size_t index) const;
  // Between two looks at whether those who are waited for are still there.
  static constexpr std::int64_t kLookNs = 1'000'000;

  bool post();
  bool read_posts();
  void read_post(int position);
  void compare(int position);
  bool is_awaited(int position) const;
  void look_for_lost();
  // The reason that a rank has left behind.
  void read_failure(int position);

  const std::uint64_t number_;
  bool posted_ = false;
  bool all_posts_read_ = false;
  std::vector<bool> read_;
  std::vector<bool> leaving_;  // gone at the last look, while this rank waited for it
  std::int64_t next_look_ns_ = 0;
  bool look_due_ = false;
};

}  // namespace netfold::collective
