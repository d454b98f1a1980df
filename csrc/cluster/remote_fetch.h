// Fetches blocks whose holders are known: in pieces, over all holders and several streams of each,
// at the same time, by the calling thread alone.
//
// A holder that fails, stalls, trickles or has a block no more is passed over, and what it was
// asked for is asked of another; where there is none, the block is missing. Each block is compared
// with its checksum on the way (net/stream_fetch.h).
// Bounds: a piece is at most kPieceBytes or one block, a stream has one under way.
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

  // Called with the index of a key and the member that does not have it after all.
  using Stale = std::function<void(std::size_t, MemberHandle)>;
  // `where`: one per key of `ask`, each with a holder.
  RemoteFetch(const Elsewhere::Ask& ask, std::span<const Whereabouts> where, const PeerBook& peers,
              BlockSink& sink, Stale stale);
  ~RemoteFetch();  // ends the streams of what is under way
  RemoteFetch(const RemoteFetch&) = delete;
  RemoteFetch& operator=(const RemoteFetch&) = delete;

  // As Elsewhere::fetch().
  Miss run();

 private:
  struct Piece {
    std::size_t from = 0, to = 0;  // keys
  };
  struct Source;
  struct Work;

  void make_sources();
  bool open(Source& source);
  void make_pieces();
  void start_some();
  bool start_at(Source& source);
  void take_by_turns();
  void step(Work& work);
  bool can_stall(const Work& work);
  bool trickles(const Work& work, std::chrono::steady_clock::time_point now);
  void look_for_stalls();
  void end_over();
  void end_work(Work& work);
  void ask_again(Piece piece, MemberHandle without, Miss why);
  void shut(Source& source, Miss why, std::chrono::steady_clock::duration waited);
  void miss(std::size_t index, Miss why);
  Source* source_of(MemberHandle member);
  bool has_other(std::size_t index, MemberHandle than);
  bool holds(MemberHandle member, std::size_t index) const;
  static void drop(Holders& holders, MemberHandle member);

  const Elsewhere::Ask ask_;
  const PeerBook& peers_;
  BlockSink& sink_;
  const Stale stale_;
  const std::chrono::steady_clock::duration stall_max_;
  const Elsewhere::Deadline opened_until_;
  std::vector<Holders> where_;         // who may still be asked
  std::size_t end_ = 0;                // nothing from here on is wanted: that one cannot be had
  Miss why_ = Miss::none;              // why not
  Miss trouble_ = Miss::disconnected;  // why the last who could not be asked could not
  std::vector<std::unique_ptr<Source>> sources_;  // best first
  std::deque<Piece> pieces_;                      // that nobody has been asked for
  std::vector<std::unique_ptr<Work>> work_;
};

}  // namespace kvpool
