// Reductions among ranks that share memory: all_reduce, reduce, reduce_scatter. All fold in rank order.
//
// Few bytes (n <= 16 KB): one step. Every rank posts its n bytes and folds all P posts.
// More: rank d folds part d of every round out of everybody's slots, and, but for reduce_scatter, hands the result on
// through its own slots to whoever needs it. Steps: 3 a round of 256 KB (contributions, results, taken).
// More, and everybody's tensor in shared memory: rank d folds part d of the tensor where it lies, straight into
// everybody's. Two steps.
//
// Bytes on the wire: none. Memory traffic a rank of P: the tensor is read once and written once; in the caches it
// copies n(P-1)/P in, folds n, and copies n(P-1)/P out. Where tensors are shared: n read, n written, nothing else.
#pragma once

#include <netfold/collective/shm_collective.hpp>

namespace netfold::collective {

class ShmReduce final : public ShmCollective {
 public:
  ShmReduce(const Call& call, transport::Mesh& mesh, transport::ShmNode& node);

 private:
  enum class Mode : std::uint8_t { undecided, streams, reducing_in_place, waiting_in_place, done_in_place };
  // Of a round: the bytes that `position` folds.
  struct Part {
    std::size_t in_slot = 0;
    std::byte* data = nullptr;  // of this rank's contribution
    std::size_t bytes = 0;
  };
  Part part(std::uint32_t round, int position) const;
  bool has_results() const { return call_.kind != Kind::reduce_scatter; }
  bool wants_results() const { return call_.kind == Kind::all_reduce || (has_results() && self_ == call_.root); }
  void reduce_posts();
  void choose_mode();
  bool reduce_in_place();
  bool contribute();
  bool reduce_contributions();
  bool collect();

  bool needs_post(int position) const override;
  void write_post(std::byte* data) override;
  std::uint64_t expected_bytes(int position) const override;
  bool advance() override;
  bool done() const override;
  bool waits_for(int position) const override;
  bool reads(Stream stream, int reader) const override;

  std::uint32_t contributed_ = 0;  // rounds
  std::uint32_t reduced_ = 0;
  std::vector<std::uint32_t> collected_;  // by position
  std::vector<const void*> sources_;
  std::size_t part_bytes_;  // of a slot, where there is a buffer for each rank
  bool posts_reduced_ = false;
  Mode mode_ = Mode::undecided;  // of what does not stand in posts
  Buffer whole_;                 // in place: what is folded here, of every rank's
  std::size_t first_ = 0;        // byte of it that is next
  std::vector<std::byte*> tensors_;
};

}  // namespace netfold::collective
