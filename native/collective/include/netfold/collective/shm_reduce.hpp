// Reductions among ranks that share memory: all_reduce, reduce, reduce_scatter. All add in rank order.
//
// Few bytes (n <= 16 KB): one step. Every rank posts its n bytes and reduces all P posts.
// More bytes: rank d reduces part d of every round from all ranks' slots. Except in reduce_scatter, it passes the
// result through its own slots to the ranks that need it. Steps: 3 a round of 256 KB (contributions, results, taken).
// More bytes, with every rank's tensor in shared memory: rank d reduces part d of the tensors in place and writes the
// result straight into every rank's tensor. Two steps.
//
// Bytes on the wire: none. Memory traffic a rank of P: the tensor is read once and written once; in the caches a rank
// copies n(P-1)/P in, reduces n, and copies n(P-1)/P out. With tensors in shared memory: n read and n written.
#pragma once

#include <netfold/collective/shm_collective.hpp>

namespace netfold::collective {

class ShmReduce final : public ShmCollective {
 public:
  ShmReduce(const Call& call, transport::Mesh& mesh, transport::ShmNode& node);

 private:
  enum class Mode : std::uint8_t { undecided, streams, reducing_in_place, waiting_in_place, done_in_place };
  // Of a round: the bytes that `position` reduces.
  struct Part {
    std::size_t in_slot = 0;
    std::byte* data = nullptr;  // of this rank's contribution
    std::size_t bytes = 0;
  };
  Part part(std::uint32_t round, int position) const;
  // The bytes of a buffer that each rank reduces: whole lines; the last ranks get the rest.
  std::size_t share_bytes(std::size_t bytes) const {
    return round_up((bytes + index(size_) - 1) / index(size_), kLine);
  }
  bool has_results() const { return call_.kind != Kind::reduce_scatter; }
  bool wants_results() const { return call_.kind == Kind::all_reduce || (has_results() && self_ == call_.root); }
  // Reduces sources_ and divides for an average.
  void reduce_sources(std::byte* into, std::size_t bytes);
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
  bool posts_reduced_ = false;
  Mode mode_ = Mode::undecided;  // of data that do not lie in posts
  // In place:
  std::size_t first_ = 0;            // the next byte of this rank's part
  std::size_t end_ = 0;              // of this rank's part
  std::vector<std::byte*> tensors_;  // by position
};

}  // namespace netfold::collective
