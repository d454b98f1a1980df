#include "cluster/remote_fetch.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cluster/far_read.h"
#include "net/socket_io.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr std::size_t kTurnBytes = 1 << 20;  // from one stream before the next has its turn
constexpr std::size_t kStreamsWanted = 4;    // of one holder
// No byte for a part of the time there is, and somebody else has it too: that one is asked instead.
constexpr int kStallShare = 4;
constexpr auto kStallMin = 20ms, kStallMax = 2000ms;
// By then a piece is so far that at its pace this part of it comes by the deadline; or whoever has
// it too, and nothing else to send, is asked for the rest.
constexpr double kTrickleShare = 0.5;
// A read that is late breaks the way to its holder for all who use it: who has less time than this
// goes over streams.
constexpr auto kFarMin = 250ms, kFarMax = 5000ms;

}  // namespace

// A holder that can be asked.
struct RemoteFetch::Source {
  std::shared_ptr<Peer> peer;
  Peer::Space space;
  StreamPool::Streams idle;
  // After `peer`: it is given back to that.
  std::optional<StreamPool::Loan> loan;
  std::shared_ptr<UcxPeer> arena;  // nullptr: there is no way to it
  std::size_t far_pieces = 0;      // under way
  double cost = 0;                 // as it was when this began
  bool is_tried = false, is_open = false;
  bool is_claimed = true;  // may_ask() said yes, and nothing has come of it yet

  MemberHandle member() const { return peer->member(); }
};

struct RemoteFetch::Work {
  Work(Source& from, std::shared_ptr<StreamClient> stream, Piece what, const Elsewhere::Ask& ask,
       BlockSink& sink)
      : source(from),
        piece(what),
        bytes((what.to - what.from) * std::uint64_t{ask.space.block_bytes}),
        fetch(std::move(stream), ask.keys.subspan(what.from, what.to - what.from), what.from,
              ask.space.block_bytes, sink) {
    source.peer->add_in_flight(bytes);
    fetch.start(source.space.number, ask.deadline);
  }
  ~Work() { source.peer->sub_in_flight(bytes); }

  Source& source;
  const Piece piece;
  const std::uint64_t bytes;
  StreamFetch fetch;
  const steady_clock::time_point began = steady_clock::now();
  steady_clock::time_point moved = began;         // when the last byte came
  std::optional<steady_clock::duration> latency;  // of the first byte
};

// A piece that is read out of an arena.
struct RemoteFetch::FarWork {
  FarWork(Source& from, std::shared_ptr<StreamClient> stream, Piece what, const Elsewhere::Ask& ask,
          BlockSink& sink)
      : source(from),
        piece(what),
        bytes((what.to - what.from) * std::uint64_t{ask.space.block_bytes}),
        read({from.peer, from.space.number, std::move(stream), from.arena},
             ask.keys.subspan(what.from, what.to - what.from), what.from, ask.space.block_bytes,
             sink) {
    source.peer->add_in_flight(bytes);
    ++source.far_pieces;
  }
  ~FarWork() {
    --source.far_pieces;
    source.peer->sub_in_flight(bytes);
  }

  Source& source;
  const Piece piece;
  const std::uint64_t bytes;
  FarRead read;
};

RemoteFetch::RemoteFetch(const Elsewhere::Ask& ask, std::span<const Whereabouts> where,
                         const PeerBook& peers, BlockSink& sink, Stale stale)
    : ask_(ask),
      peers_(peers),
      sink_(sink),
      stale_(std::move(stale)),
      stall_max_(std::clamp<steady_clock::duration>(
          (ask.deadline - steady_clock::now()) / kStallShare, kStallMin, kStallMax)),
      far_max_(std::clamp<steady_clock::duration>(
          (ask.deadline - steady_clock::now()) / kStallShare, kFarMin, kFarMax)),
      opened_until_(steady_clock::now() + (ask.deadline - steady_clock::now()) / 2),
      end_(ask.keys.size()) {
  for (const Whereabouts& each : where) where_.push_back(each.holders);
}

RemoteFetch::~RemoteFetch() {
  for (const auto& work : work_) work->fetch.give_up(Miss::timed_out);
  work_.clear();
  far_.clear();
  for (const auto& source : sources_)
    if (source->is_claimed) source->peer->not_asked();
}

Miss RemoteFetch::run() {
  make_sources();
  make_pieces();
  for (;;) {
    start_some();
    if (work_.empty() && far_.empty()) break;
    if (!work_.empty()) {
      take_by_turns(far_.empty());
      look_for_stalls();
      end_over();
    }
    if (!far_.empty()) end_far();
  }
  return why_;
}

// --- whom to ask ---------------------------------------------------------------------------------

void RemoteFetch::make_sources() {
  for (Holders& holders : where_)
    for (const MemberHandle member : Holders(holders)) {
      if (member == kNoMember || source_of(member) != nullptr) continue;
      auto peer = peers_.of(member);
      if (peer == nullptr || !peer->may_ask()) continue;
      sources_.push_back(std::make_unique<Source>());
      sources_.back()->peer = std::move(peer);
    }
  // The same ones are not always first where all are as good.
  if (sources_.size() > 1)
    std::ranges::rotate(sources_, sources_.begin() + static_cast<std::ptrdiff_t>(ask_.keys[0].low %
                                                                                 sources_.size()));
  const std::uint64_t bytes =
      std::min(kPieceBytes, ask_.keys.size() * std::uint64_t{ask_.space.block_bytes});
  // Once each: what other calls fetch changes it meanwhile, and an order may not.
  for (const auto& source : sources_) source->cost = source->peer->cost(bytes);
  std::ranges::stable_sort(sources_, {}, [](const auto& source) { return source->cost; });
}

RemoteFetch::Source* RemoteFetch::source_of(MemberHandle member) {
  const auto found = std::ranges::find_if(
      sources_, [&](const auto& source) { return source->member() == member; });
  return found == sources_.end() ? nullptr : found->get();
}

// The namespace's number there, and streams. Where there are others to ask it is not waited for
// long: what they send is taken by this thread.
bool RemoteFetch::open(Source& source) {
  if (std::exchange(source.is_tried, true)) return source.is_open;
  const auto now = steady_clock::now();
  const Deadline until =
      sources_.size() == 1 ? ask_.deadline : std::min(opened_until_, now + stall_max_);
  Miss why = Miss::none;
  const auto space = source.peer->space(ask_.space.id, until, why);
  const bool is_there = space && space->block_bytes == ask_.space.block_bytes;
  bool late = false;
  if (is_there) {
    auto loan = source.peer->borrow_bulk(kStreamsWanted, until, late);
    source.idle = loan.streams();
    source.loan.emplace(std::move(loan));
    source.space = *space;
    if (!source.idle.empty()) source.arena = source.peer->far().get(until);
    why = late ? Miss::timed_out : source.idle.empty() ? Miss::disconnected : Miss::none;
  } else if (space) {
    why = Miss::absent;  // of another size there: no block of ours
  }
  source.is_open = why == Miss::none;
  if (!source.is_open) {
    trouble_ = why;
    shut(source, late ? Miss::absent : why, steady_clock::now() - now);  // busy is not broken
  }
  return source.is_open;
}

// Nothing more is asked of it. `why` absent, or moved, which is for want of memory here: that is no
// fault of its own.
void RemoteFetch::shut(Source& source, Miss why, steady_clock::duration waited) {
  source.is_open = false;
  source.is_tried = true;
  if (why == Miss::absent || why == Miss::moved) {
    if (source.is_claimed) source.peer->not_asked();
  } else {
    source.peer->failed(why, waited);
    source.peer->forget_space(ask_.space.id);
  }
  source.is_claimed = false;
}

bool RemoteFetch::holds(MemberHandle member, std::size_t index) const {
  return std::ranges::find(where_[index], member) != where_[index].end();
}

bool RemoteFetch::has_other(std::size_t index, MemberHandle than) {
  return std::ranges::any_of(where_[index], [&](MemberHandle member) {
    if (member == kNoMember || member == than) return false;
    const Source* source = source_of(member);
    return source != nullptr && (!source->is_tried || source->is_open);
  });
}

void RemoteFetch::drop(Holders& holders, MemberHandle member) {
  std::ranges::replace(holders, member, kNoMember);
}

// --- what to ask ---------------------------------------------------------------------------------

// Pieces of keys that the same members hold: so many that every stream has one, if they are worth
// a request of their own.
void RemoteFetch::make_pieces() {
  const std::uint64_t block_bytes = ask_.space.block_bytes;
  const std::size_t streams = std::max<std::size_t>(sources_.size(), 1) * (kStreamsWanted - 1);
  const std::uint64_t share = ask_.keys.size() * block_bytes / streams;
  const std::uint64_t piece_bytes = std::clamp(share, kPieceBytesMin, kPieceBytes);
  const std::size_t most = std::clamp<std::size_t>(piece_bytes / block_bytes, 1, kKeysPerRequest);
  for (std::size_t from = 0; from < ask_.keys.size();) {
    std::size_t to = from + 1;
    while (to < ask_.keys.size() && to - from < most && where_[to] == where_[from]) ++to;
    pieces_.push_back({from, to});
    from = to;
  }
}

void RemoteFetch::start_some() {
  const auto is_late = steady_clock::now() >= ask_.deadline;
  for (const Piece& piece : is_late ? std::exchange(pieces_, {}) : std::deque<Piece>{})
    miss(piece.from, Miss::timed_out);
  std::erase_if(pieces_, [&](const Piece& piece) { return piece.from >= end_; });
  // One each in turn, so that a few pieces are spread.
  for (bool is_started = true; is_started && !pieces_.empty();) {
    is_started = false;
    for (const auto& source : sources_) is_started |= start_at(*source);
  }
  if (!work_.empty() || !far_.empty()) return;
  // Nobody is left who could be asked for these.
  while (!pieces_.empty()) {
    miss(pieces_.front().from, trouble_);
    pieces_.pop_front();
  }
}

// The first piece that it holds, on a stream of its own.
bool RemoteFetch::start_at(Source& source) {
  if (source.is_tried && (!source.is_open || source.idle.empty())) return false;
  const auto piece = std::ranges::find_if(pieces_, [&](const Piece& each) {
    return each.from < end_ && holds(source.member(), each.from);
  });
  if (piece == pieces_.end()) return false;
  if (!open(source)) return false;
  const Piece what{piece->from, std::min(piece->to, end_), piece->by_stream};
  const bool is_far = may_read_far(source, what);
  if (is_far && source.far_pieces >= kFarPieces) return false;
  pieces_.erase(piece);
  if (is_far) {
    start_far(source, what);
    return true;
  }
  auto stream = std::move(source.idle.back());
  source.idle.pop_back();
  work_.push_back(std::make_unique<Work>(source, std::move(stream), what, ask_, sink_));
  return true;
}

// --- out of arenas -------------------------------------------------------------------------------

bool RemoteFetch::may_read_far(const Source& source, const Piece& piece) const {
  const std::uint64_t bytes = (piece.to - piece.from) * std::uint64_t{ask_.space.block_bytes};
  return source.arena != nullptr && !piece.by_stream && bytes >= kFarBytesMin &&
         !source.arena->is_broken() && steady_clock::now() + far_max_ < ask_.deadline;
}

void RemoteFetch::start_far(Source& source, const Piece& piece) {
  auto stream = std::move(source.idle.back());
  source.idle.pop_back();
  far_.push_back(std::make_unique<FarWork>(source, std::move(stream), piece, ask_, sink_));
  const auto until = steady_clock::now() + far_max_;
  far_.back()->read.begin(sources_.size() == 1 ? ask_.deadline : until, until);
}

// The one that began first. Those behind it are on their way meanwhile.
void RemoteFetch::end_far() {
  const auto work = std::move(far_.front());
  far_.pop_front();
  work->read.end(ask_.deadline);
  Source& source = work->source;
  if (work->read.has_failed()) source.arena = nullptr;
  const Miss trouble = work->read.trouble();
  if (trouble == Miss::none) {
    source.peer->succeeded(work->read.latency());
    source.is_claimed = false;
    source.idle.push_back(work->read.stream());
  } else {
    shut(source, trouble, work->read.latency());
  }
  const std::size_t index = work->piece.from + work->read.delivered();
  if (index < work->piece.to) end_far_rest(*work, index);
}

// What it did not bring, from `index` on.
void RemoteFetch::end_far_rest(FarWork& work, std::size_t index) {
  const FarRead& read = work.read;
  const MemberHandle member = work.source.member();
  const Piece rest{index, work.piece.to, /*by_stream=*/true};
  if (read.trouble() != Miss::none) return ask_again(rest, member, read.trouble());
  if (read.delivered() < read.leased() || read.why() != Miss::absent)
    return pieces_.push_front(rest);
  work.source.peer->count_stale();
  stale_(index, member);
  if (index + 1 < rest.to) pieces_.push_front({index + 1, rest.to});
  ask_again({index, index + 1}, member, Miss::absent);
}

// --- taking --------------------------------------------------------------------------------------

// Whatever has come on any stream, once.
void RemoteFetch::take_by_turns(bool may_wait) {
  std::vector<pollfd> ready;
  auto next = ask_.deadline;
  for (const auto& work : work_) {
    if (work->fetch.is_over()) return;  // as one that could not be started
    ready.push_back({.fd = work->fetch.stream()->descriptor(), .events = POLLIN, .revents = 0});
    if (can_stall(*work))
      next = std::min(next, std::max(work->moved + stall_max_, steady_clock::now() + 1ms));
  }
  poll(ready.data(), ready.size(), may_wait ? std::max(poll_ms(next), 0) : 0);
  for (std::size_t i = 0; i < ready.size(); ++i)
    if (ready[i].revents != 0) step(*work_[i]);
}

void RemoteFetch::step(Work& work) {
  const std::size_t before = work.fetch.delivered();
  if (!work.fetch.step(kTurnBytes)) return;
  work.moved = steady_clock::now();
  if (!work.latency) work.latency = work.moved - work.began;
  const std::size_t more = work.fetch.delivered() - before;
  work.source.peer->count_fetched(more, more * ask_.space.block_bytes);
}

// Somebody else could be asked for what it does not bring; or it brings nothing that is wanted.
bool RemoteFetch::can_stall(const Work& work) {
  const std::size_t index = work.piece.from + work.fetch.delivered();
  return index >= std::min(work.piece.to, end_) || has_other(index, work.source.member());
}

// Bytes come, but so few that most of the piece would not be there by the deadline. Where all are
// slow nothing is won by asking another: it has to be one that sends nothing just now.
bool RemoteFetch::trickles(const Work& work, steady_clock::time_point now) {
  const auto passed = now - work.began, whole = ask_.deadline - work.began;
  if (passed < std::max<steady_clock::duration>(whole / kStallShare, kStallMin)) return false;
  const auto count = static_cast<double>(work.piece.to - work.piece.from);
  const auto here = static_cast<double>(work.fetch.delivered());
  const double comes = here * (std::chrono::duration<double>(whole) / passed);
  if (comes >= kTrickleShare * count) return false;
  const std::size_t index = work.piece.from + work.fetch.delivered();
  return std::ranges::any_of(sources_, [&](const auto& source) {
    return source.get() != &work.source && (!source->is_tried || source->is_open) &&
           source->far_pieces == 0 && holds(source->member(), index) &&
           std::ranges::none_of(work_,
                                [&](const auto& other) { return &other->source == source.get(); });
  });
}

void RemoteFetch::look_for_stalls() {
  const auto now = steady_clock::now();
  for (const auto& work : work_) {
    if (work->fetch.is_over()) continue;
    const bool is_stalled = now - work->moved >= stall_max_ && can_stall(*work);
    if (is_stalled || now >= ask_.deadline || trickles(*work, now))
      work->fetch.give_up(Miss::timed_out);
  }
}

void RemoteFetch::end_over() {
  for (std::size_t i = 0; i < work_.size();) {
    if (!work_[i]->fetch.is_over()) {
      ++i;
      continue;
    }
    const auto work = std::move(work_[i]);
    work_.erase(work_.begin() + static_cast<std::ptrdiff_t>(i));
    end_work(*work);
  }
}

void RemoteFetch::end_work(Work& work) {
  Source& source = work.source;
  const bool is_live = work.fetch.stream()->is_live();
  if (is_live) {
    source.peer->succeeded(work.latency.value_or(steady_clock::now() - work.began));
    source.is_claimed = false;
    source.idle.push_back(work.fetch.stream());
  }
  const std::size_t index = work.piece.from + work.fetch.delivered();
  const Miss why = work.fetch.why();
  if (!is_live)
    shut(source, why == Miss::none ? Miss::disconnected : why, steady_clock::now() - work.moved);
  if (index >= work.piece.to) return;
  if (!is_live) return ask_again({index, work.piece.to}, source.member(), why);
  if (why == Miss::absent) {
    source.peer->count_stale();
    stale_(index, source.member());
  }
  // Nor would it give those behind it.
  if (why == Miss::limited) return ask_again({index, work.piece.to}, source.member(), why);
  // Of those behind it nothing was said.
  if (index + 1 < work.piece.to) pieces_.push_front({index + 1, work.piece.to});
  ask_again({index, index + 1}, source.member(), why);
}

// Where somebody else has it; else it is missing.
void RemoteFetch::ask_again(Piece piece, MemberHandle without, Miss why) {
  for (std::size_t i = piece.to; i-- > piece.from;) {
    drop(where_[i], without);
    if (has_other(i, kNoMember)) {
      pieces_.push_front({i, i + 1});
      // In one piece with the next, if the same ones hold that.
      if (pieces_.size() > 1 && pieces_[1].from == i + 1 && i + 1 < piece.to &&
          where_[i] == where_[i + 1]) {
        pieces_[1].from = i;
        pieces_.pop_front();
      }
    } else {
      miss(i, why);
    }
  }
}

void RemoteFetch::miss(std::size_t index, Miss why) {
  if (index >= end_) return;
  end_ = index;
  why_ = why;
}

}  // namespace kvpool
