// The common part of collectives among ranks that share memory: posts, streams, and the check of the other ranks.
//
// Every rank posts what it is about to do, with the header that messages carry between hosts, so that a rank in another
// call is reported before a wrong value is read. Before a call succeeds, the rank compares every post that is there, also
// those whose data it does not need. So of any two ranks in different calls, the second fails, and the first fails in its
// next call: two roots of one broadcast, say, of which neither waits for the other. Few bytes of data lie in the post itself. Longer data go through a
// stream of slots, round by round, several rounds in flight, so that nearly all copies stay in the caches. The post
// refers to the data instead, and other ranks read them in place, where the data lie in memory that other ranks can map
// (transport/shm/shm_registry.hpp) or where ranks may read each other's memory (transport/shm/peer_memory.hpp).
//
// Tensors that a post refers to are exported until every rank that needs them has finished with them, or their owner
// gives up. Each chunk is read or written inside a use of that lease (ShmNode::begin_use). A rank that gives up revokes
// the lease and waits for running uses before its caller gets the buffer back.
//
// A post and the slots of a stream are reused once every reader has marked them as read. So a rank can be ahead of the
// other ranks by a few calls, and ahead of its readers by the slots of its stream.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <optional>

namespace netfold::collective {

class ShmCollective : public Algorithm {
 public:
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 protected:
  using Node = transport::ShmNode;
  using Stream = Node::Stream;
  // Borrows all three for its lifetime. Positions in the node index the call's buffers and name its root.
  ShmCollective(const Call& call, transport::Mesh& mesh, Node& node);

  static constexpr std::size_t kLine = 64;
  static std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }
  static std::size_t index(int position) { return static_cast<std::size_t>(position); }

  // Whether the post of `position` must be read before anything else.
  virtual bool needs_post(int position) const = 0;
  virtual void write_post(std::byte* data) = 0;
  // The value of `bytes` in the header of `position`'s post. In a call with a buffer for each rank: the size that the
  // post's table must give for this rank.
  virtual std::uint64_t expected_bytes(int position) const = 0;
  // Called once all posts are read. Does a bounded amount of work; false when there was nothing to do.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  virtual bool waits_for(int position) const = 0;
  // Whether `reader` reads what this rank writes to a stream.
  virtual bool reads(Stream stream, int reader) const = 0;

  // --- posts ---

  bool is_posted() const { return posted_; }
  // Compares the posts of this call that are there, also those that the call does not wait for.
  void check_posts();
  // The posts that are not there end the sleep.
  void await_posts() const;
  // Checks whether the other ranks are still there; fills failure_. At most once a millisecond.
  void check_peers(std::int64_t now_ns);
  void wait_for_check(WaitSet& set) const;

  // Whether the post begins with a table of the sizes of the call's inputs: in calls with an input for each rank.
  bool has_table() const;
  std::size_t table_bytes() const { return has_table() ? index(size_) * sizeof(std::uint64_t) : 0; }
  // The rounds in which the whole buffer `given`, or with a table the call's inputs, go through the stream. 0: the data
  // fit in the post.
  std::uint32_t rounds_for(const Buffer& given) const;
  // Writes the table. Returns the place behind it.
  std::byte* write_table(std::byte* data) const;
  // Writes the call's inputs behind the table, each at the start of a line.
  void write_inputs(std::byte* data) const;
  const std::byte* post_data(int position) const { return node_.post(position, number_).data; }

  // --- buffers that posts refer to ---

  // Makes the post refer to `buffers`, from `data` on, if all lie in shared memory. The readers of `stream` read them.
  void refer(std::byte* data, std::span<const Buffer> buffers, Stream stream);
  // The same by their addresses in this process, for ranks that read this process's memory.
  void refer_by_address(std::byte* data, std::span<const Buffer> buffers);
  // Buffer `number` that the post of `position` refers to, mapped here; fills `failure_` where it cannot be mapped.
  std::byte* referred(int position, std::size_t number, std::size_t bytes);
  std::uint64_t referred_address(int position, std::size_t number) const { return reference(position, number).offset; }
  // Begins a use of the buffers of `position`, which node_.end_use ends. False, with `failure_`: that rank has left.
  bool begin_use(int position);
  bool begin_use_of_all();
  // Asks `position` to send through slots instead; and whether that rank asks this one.
  void ask_for_slots(Stream stream, int position);
  bool is_asked_for_slots(Stream stream, int position) const;
  // Tells whether this rank can access the other ranks' tensors, and what all ranks told: empty until all have.
  void tell_access(bool can);
  std::optional<bool> access_of_all() const;
  bool told_access(int position) const;
  // Fails the call: the rank's connection is closed, or its process has ended.
  void lose(int position);

  // --- streams ---

  std::uint64_t tag(std::uint32_t rounds) const { return (number_ << 24) + rounds; }
  // How many rounds of this call `position` has published.
  std::uint32_t published(Stream stream, int position) const;
  bool slot_is_free(Stream stream, std::uint32_t round) const;
  std::byte* slot(Stream stream, int position, std::uint32_t round) const;
  void publish(Stream stream, std::uint32_t rounds);
  // Marks rounds of `position` as read by this rank.
  void take(Stream stream, int position, std::uint32_t rounds);
  // Whether `reader` has marked so many rounds of this rank as read.
  bool has_taken(Stream stream, int reader, std::uint32_t rounds) const;

  enum class Refers : std::uint32_t { not_at_all = 0, to_regions = 1, to_addresses = 2 };
  struct Announcement {
    MessageHeader header;
    std::uint32_t rounds = 0;  // of the stream; 0: the data lie in the post
    Refers refers = Refers::not_at_all;
  };
  static_assert(sizeof(Announcement) == Node::kAnnouncementBytes);

  const Call& call_;
  transport::Mesh& mesh_;
  Node& node_;
  const int self_;
  const int size_;
  const std::size_t part_bytes_;  // of a slot, for each rank where each has a buffer
  Announcement own_;
  std::vector<Announcement> others_;  // by position, once read

 private:
  struct Reference {
    std::uint64_t region = 0;  // 0: `offset` is an address
    std::uint64_t offset = 0;
  };
  // The time between two checks whether awaited ranks are still there.
  static constexpr std::int64_t kCheckNs = 1'000'000;
  // Every kLookNs of its wait a rank looks whether the next kLooks ranks behind it have ended; once around, at all of
  // them, after as much time as that took. One rank that sees the end tells all others in memory.
  static constexpr std::int64_t kLookNs = 100'000'000;
  static constexpr int kLooks = 8;

  Reference reference(int position, std::size_t number) const;
  bool post();
  bool post_is_free();
  bool reads_all_posts() const;
  bool read_posts();
  void read_post(int position);
  void compare(int position);
  // Before the call succeeds: fails where another rank gave it up.
  void find_gave_up();
  bool is_awaited(int position) const;
  void find_lost();
  bool has_ended(int position);
  // Fails with the reason that a rank left in its segment.
  void read_failure(int position);

  const std::uint64_t number_;
  bool posted_ = false;
  bool all_posts_read_ = false;  // those that the call needs
  bool all_read_ = false;        // all posts
  std::vector<bool> read_;
  std::vector<bool> leaving_;  // gone at the last check, while this rank waited for it
  std::int64_t next_check_ns_ = 0;
  std::int64_t look_ns_ = -1;
  bool looks_ = false;
  int looked_at_ = 0;  // the ranks behind this one, up to all
  bool check_due_ = false;
};

}  // namespace netfold::collective
