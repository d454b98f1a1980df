// What travels on a stream (docs/protocol.md): frames of a fixed head and a bounded body, all
// little-endian. Whoever receives one checks every field before using it; an address never travels.
//
// Client: Request, keys (16 bytes each), then for a put one Block + payload per key from `skip` on.
// Node:   for a get, one Block + payload per delivered block; then, for every request, an Answer
//         and its body (lookup: a tier byte per key; put: a status byte per key; acquire: a
//         LeasePlace per block; those of peers: below). Answers come in the order of the requests.
//
// `release` of a peer gives back what lease_far gave on the same stream.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "block/checksum.h"
#include "block/key.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::uint32_t kRequestMagic = 0x5152'564b;  // "KVRQ"
inline constexpr std::uint32_t kAnswerMagic = 0x4e41'564b;   // "KVAN"
inline constexpr std::uint32_t kBlockMagic = 0x4c42'564b;    // "KVBL"
inline constexpr std::uint8_t kFrameVersion = 1;
inline constexpr std::uint32_t kKeysPerRequest = 8192;  // longer calls are cut
inline constexpr std::uint32_t kDeadlineMaxMs = 86'400'000;

enum class Op : std::uint8_t {
  lookup = 1,
  get = 2,
  put = 3,
  remove = 4,
  wait = 5,
  acquire = 6,  // unix only: leases on places in the mapped arena
  release =
      7,  // keys are not keys but lease numbers, 8 bytes used of 16; unknown ones are passed by
  // Between nodes alone. `space` is 0, but for lease_far; keys of publish, withdraw and locate are
  // directory keys.
  find_space = 8,  // keys are ids of namespaces; a FoundSpace per key
  publish = 9,     // an Announcement comes before the keys
  withdraw = 10,   // so it does here
  locate = 11,     // LocatedHead, HolderNames, then kHoldersPerKey indexes of 2 bytes per key
  // FarHead, then a FarPlace for each leading block in DRAM: the peer reads those by itself, out of
  // the arena that it connected to at its hello (net/ucx_lane.h).
  lease_far = 12,
  pull = 13,  // a PullHead comes before the keys; the answer's body is a PullAnswer
};
constexpr bool is_known(Op op) { return op >= Op::lookup && op <= Op::pull; }
constexpr bool is_of_peers(Op op) { return op >= Op::find_space; }
constexpr bool is_without_space(Op op) { return is_of_peers(op) && op != Op::lease_far; }
// What another node may ask: it reads, and changes nothing but what it told, or leased, itself.
constexpr bool is_for_peers(Op op) {
  return op == Op::lookup || op == Op::get || op == Op::release || is_of_peers(op);
}
constexpr bool has_announcement(Op op) { return op == Op::publish || op == Op::withdraw; }

struct Request {
  std::uint32_t magic = kRequestMagic;
  std::uint8_t version = kFrameVersion;
  Op op{};
  std::uint16_t flags = 0;  // see flags_of()
  std::uint64_t id = 0;     // comes back in the answer
  std::uint32_t space = 0;  // the node's number of the namespace
  // Keys, 1..kKeysPerRequest; with kHasParent one more key comes first. Of a publish also 0.
  std::uint32_t count = 0;
  std::uint32_t skip = 0;  // put: so many leading blocks bring no payload
  std::uint32_t deadline_ms = 0;
};
inline constexpr std::uint16_t kHasParent = 1;
// A lookup that its client makes for another call's sake: no lookup in the node's traffic.
inline constexpr std::uint16_t kIsPart = 2;
// What this node has by itself: it asks no other for the rest. Peers are answered so in any case.
inline constexpr std::uint16_t kHereOnly = 4;
// A publish before which all that is known of its sender is forgotten.
inline constexpr std::uint16_t kFresh = 8;
// A pull of blocks that nobody will have when its sender is gone.
inline constexpr std::uint16_t kLastCopies = 16;
constexpr std::uint16_t flags_of(Op op) {
  switch (op) {
    case Op::put:
      return kHasParent;
    case Op::lookup:
      return kIsPart | kHereOnly;
    case Op::get:
      return kHereOnly;
    case Op::publish:
      return kFresh;
    case Op::pull:
      return kLastCopies;
    default:
      return 0;
  }
}
static_assert(sizeof(Request) == 32);

// How much a member has to do, told along with its answers to others; zero: it does not say.
struct MemberLoad {
  std::uint32_t served_kib_s = 0;  // bytes that it sends, over the last seconds
  std::uint16_t taken = 0;         // of its DRAM, in 1/65,535
  std::uint16_t is_told = 0;       // 1: the two above are
};
static_assert(sizeof(MemberLoad) == 8);

struct Answer {
  std::uint32_t magic = kAnswerMagic;
  std::uint8_t version = kFrameVersion;
  Op op{};
  std::uint8_t miss = 0;    // Miss of the first block that is missing
  std::uint8_t failed = 0;  // Refusal: the request was not carried out
  std::uint64_t id = 0;
  std::uint32_t count = 0;       // blocks found, delivered, removed, or statuses
  std::uint32_t body_bytes = 0;  // that follow
  MemberLoad load{};             // publish, withdraw, locate, pull
};
static_assert(sizeof(Answer) == 32);

enum class Refusal : std::uint8_t {
  none = 0,
  no_space = 1,  // no namespace of that number: the node began another life, ask again by manifest
  draining = 2,
  not_here = 3,  // this op is not for this kind of connection, or this node is no member
  gap = 4,       // publish, withdraw: batches are missing before it; tell all anew, with kFresh
  stale = 5,     // publish, withdraw: a newer life of this member is known
  full = 6,      // publish, withdraw: no place for one more member just now
};

// In front of every payload, in both directions.
struct Block {
  std::uint32_t magic = kBlockMagic;
  std::uint8_t version = kFrameVersion;
  std::uint8_t reserved[3] = {};
  std::uint64_t id = 0;     // of the request
  std::uint32_t index = 0;  // in the request
  // Of payload, = block_bytes of the namespace; in a put 0 if its sender could not produce it.
  std::uint32_t bytes = 0;
  std::uint64_t key_low = 0, key_high = 0;
  std::uint64_t generation = 0;  // of the record it was read from; 0 in a put
  std::uint64_t sum_low = 0,
                sum_high = 0;  // XXH3-128 of the payload; in a put the node's to compare
  std::uint64_t check = 0;     // low 64 bits of the XXH3-128 of the 64 bytes before
};
static_assert(sizeof(Block) == 72 && offsetof(Block, check) == 64);

inline std::uint64_t check_of(const Block& block) {
  return checksum(&block, offsetof(Block, check)).low;
}

struct LeasePlace {
  std::uint64_t lease = 0;  // number, to be released
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(LeasePlace) == 24);

// --- between nodes -------------------------------------------------------------------------------

struct Announcement {
  Hash128 node;                   // id of the member that has, or had, the blocks
  std::uint64_t incarnation = 0;  // its life; a later one has a larger number
  // One more than in the batch before, to the same member; with kFresh any larger one. A batch that
  // got no answer is sent again as it was.
  std::uint64_t sequence = 0;
};
static_assert(sizeof(Announcement) == 32);

struct FoundSpace {
  std::uint32_t number = 0;
  std::uint32_t block_bytes = 0;  // 0: there is none of this id
};
static_assert(sizeof(FoundSpace) == 8);

// Whoever sends it has the blocks and asks the receiver to fetch them, from whom it likes. The same
// request with the same number asks how far that is.
struct PullHead {
  Hash128 space;             // id of the namespace
  Hash128 from;              // id of the member that asks
  Hash128 before{};          // key of the block before the first; zero: not known
  std::uint64_t number = 0;  // of the sender's request, to be told from those before it
  std::uint32_t block_bytes = 0;
  std::uint32_t heat_milli = 0;  // of the coldest of the blocks, at the sender
};
static_assert(sizeof(PullHead) == 64);

enum class Pulling : std::uint8_t {
  over = 0,      // nothing is under way: `here` of the blocks are here
  working = 1,   // `left` are still to be fetched
  busy = 2,      // others are fetched first: ask again later
  too_cold = 3,  // colder than what would go for them
  no_room = 4,
  refused = 5,  // it leaves itself, or cannot have this namespace
};

struct PullAnswer {
  std::uint32_t here = 0, left = 0;  // blocks
  Pulling state = Pulling::over;
  std::uint8_t reserved[7] = {};
};
static_assert(sizeof(PullAnswer) == 16);

// Leases that one stream of a peer may have at a time.
inline constexpr std::uint32_t kFarLeasesMax = kKeysPerRequest;
struct FarHead {
  std::uint64_t lane = 0;      // number of the arena that the places are in; 0: none is leased
  std::uint32_t limit_ms = 0;  // from when the request was sent: then they may be other blocks'
  std::uint32_t reserved = 0;
};
static_assert(sizeof(FarHead) == 16);
// The lease is the node's promise that the bytes stay; whether they did, the sum says.
struct FarPlace {
  std::uint64_t lease = 0;  // number, to be released
  std::uint64_t offset = 0;
  std::uint64_t generation = 0;  // of the record
  std::uint64_t sum_low = 0, sum_high = 0;
  std::uint32_t bytes = 0;  // = block_bytes of the namespace
  std::uint32_t reserved = 0;
};
static_assert(sizeof(FarPlace) == 48);

inline constexpr std::size_t kHoldersPerKey = 4;
inline constexpr std::uint16_t kNoHolder = 0xffff;
struct LocatedHead {
  std::uint16_t names = 0;  // HolderNames that follow
  std::uint16_t reserved[3] = {};
};
static_assert(sizeof(LocatedHead) == 8);
struct HolderName {
  Hash128 id;
  std::uint64_t incarnation = 0;
  friend bool operator==(const HolderName&, const HolderName&) = default;
};
static_assert(sizeof(HolderName) == 24);

static_assert(std::is_trivially_copyable_v<Request> && std::is_trivially_copyable_v<Answer> &&
              std::is_trivially_copyable_v<Block>);

}  // namespace kvpool
