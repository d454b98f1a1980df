// Fetches blocks whose holders are known: in pieces, over all holders and several streams of each,
// at the same time, by the calling thread alone.
//
// A holder that fails, stalls or has a block no more is passed over, and what it was asked for is
// asked of another; where there is none, the block is missing. Each block is compared with its
// checksum on the way (net/stream_fetch.h).
// Bounds: a piece is at most kPieceBytes, a stream has one under way.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cluster/locate_round.h"
#include "net/stream_fetch.h"
#include "node/elsewhere.h"

namespace kvpool {

class RemoteFetch {
 public:
  static constexpr std::uint64_t kPieceBytes = 8ull << 20;
  static constexpr std::uint64_t kPieceBytesMin = 256ull << 10;

  // `stale(i, member)`: it said that it does not have key i.
  using Stale = std::function<void(std::size_t, MemberHandle)>;
  RemoteFetch(const Elsewhere::Ask& ask, std::span<const Whereabouts> where, const PeerBook& peers,
              BlockSink& sink, Stale stale);
  ~RemoteFetch();

  // As Elsewhere::fetch().
  Miss run();

 private:
  struct Piece;
  struct Source;
  struct Work;
  class Counted;

  void make_sources();
  void make_pieces();
  bool start_some();
  bool start_at(Source& source);
  bool take_by_turns();
  void end_work(Work& work);
  void give_up(Work& work, Miss why);
  void ask_again(const Piece& piece, std::size_t from, MemberHandle without, Miss why);
  void miss(std::size_t index, Miss why);
  bool holds(const Source& source, std::size_t index) const;

  const Elsewhere::Ask ask_;
  const PeerBook& peers_;
  BlockSink& sink_;
  const Stale stale_;
  std::vector<Holders> where_;  // of those that may still be asked
  std::vector<Miss> missed_;    // why the last who was asked did not bring it
  std::size_t end_ = 0;         // nothing from here on can be had
  std::vector<Source> sources_;
  std::deque<Piece> pieces_;  // nobody has them
  std::vector<std::unique_ptr<Work>> work_;
};

}  // namespace kvpool
