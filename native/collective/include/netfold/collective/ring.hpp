// Ring all-reduce: reduce-scatter round the ring, then all-gather round the ring (Patarasuk & Yuan, 2009).
//
// Steps: 2(P-1). Bytes sent by a rank for n bytes of tensor: 2n(P-1)/P, the least any host algorithm can
// send, one message header, and a word a sub-block. The tensor is cut into P blocks, a block into sub-blocks of about
// kSubBlockBytes; what is received of one step is sent on in the next as soon as its sub-block is reduced, so
// a step costs one sub-block of latency, not one block.
//
// A rank hears of a lost one by way of its neighbour: between two sub-blocks a stream can end with the reason
// and the rank at fault, and every rank passes that on.
//
// A wire format narrower than the tensor is rounded at every hop while sums travel, and once more by the
// owner of a finished block, so that every rank ends with the same bits.
#pragma once

#include <netfold/collective/message.hpp>

namespace netfold::collective {

class Ring final : public Algorithm {
 public:
  // Fits the L2 cache of current cores beside its scratch, and is far above a socket call's cost.
  static constexpr std::size_t kSubBlockBytes = 256 << 10;

  // Borrows both for its life. Kind all_reduce only; P >= 2.
  Ring(const Call& call, transport::Mesh& mesh);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override { return receive_header_.done(); }

 private:
  // Longest that a failure is held back for the rest of a sub-block that is half sent.
  static constexpr std::int64_t kLastPieceNs = 100'000'000;

  struct Piece {  // elements
    std::size_t first = 0;
    std::size_t count = 0;
  };
  // Sub-block `index` of the stream this rank sends (or receives): step index / S, block (rank - step) mod P.
  Piece piece(std::size_t index, int rank) const;
  std::size_t stream_bytes(int rank) const;
  bool advance_send();
  bool advance_receive();
  transport::Mesh::Io send_piece();
  Failure next_lost(Failure lost);
  Progress finish_piece(std::int64_t now_ns);
  void load_send();
  void store_received();

  const Call& call_;
  transport::Mesh& mesh_;
  int ranks_;
  int next_;
  int previous_;
  std::size_t element_bytes_;
  std::size_t wire_element_bytes_;
  std::size_t sub_blocks_;  // S, of every block
  std::size_t total_;       // sub-blocks in a stream: 2(P-1)S
  Outgoing send_header_;
  IncomingHeader receive_header_;

  std::size_t sent_pieces_ = 0;
  std::size_t sent_bytes_ = 0;  // of the present piece, its word included
  bool send_loaded_ = false;
  const std::byte* send_at_ = nullptr;
  std::size_t send_piece_bytes_ = 0;

  std::size_t received_pieces_ = 0;
  std::size_t received_bytes_ = 0;  // of the present piece, its word included
  PieceWord word_ = PieceWord::piece;
  std::int64_t give_up_ns_ = -1;

  std::vector<std::byte> send_staging_;     // wire format, when it differs from the tensor's
  std::vector<std::byte> receive_staging_;  // wire format
  std::vector<std::byte> decoded_;          // tensor format, when it differs
};

}  // namespace netfold::collective
