// A node that keeps a part of the directory, and a wire to it: real frames over a real socket.
#pragma once
#include <map>
#include <memory>
#include <set>

#include "cluster/directory_shard.h"
#include "cluster/wire.h"
#include "net_cases.h"

namespace kvpool::test {

// What a request of a peer was answered.
struct PeerAnswer {
  Answer head{.magic = 0};
  Bytes body;
};

inline PeerAnswer receive_peer_answer(const Descriptor& from) {
  PeerAnswer answer{.head = receive_answer(from), .body = {}};
  if (answer.head.magic != 0) answer.body = receive_bytes(from, answer.head.body_bytes);
  return answer;
}

inline Bytes announced(const Request& head, const Announcement& from,
                       std::span<const Hash128> keys) {
  Bytes made;
  append(made, head);
  append(made, from);
  append_bytes(made, std::as_bytes(keys));
  return made;
}

struct Member {
  Served served{Pool::plain(16 * kMiB)};
  std::shared_ptr<DirectoryShard> shard;

  explicit Member(const DirectoryOptions& options = {.bytes_max = 4 << 20, .salt = 11})
      : shard(std::make_shared<DirectoryShard>(options)) {
    served.server->set_directory(shard);
  }
  Descriptor dial(const HolderName& as, StreamKind kind = StreamKind::peer) {
    Ends ends(Kind::unix_socket);
    REQUIRE(served.server->add_stream(served.client, give(ends.far), kind, as).has_value());
    return std::move(ends.near);
  }
};

// Sends batches as another node does. One member is out of reach, as its test says.
class StreamWire final : public Wire {
 public:
  void connect(MemberHandle to, Descriptor stream) { streams_[to] = std::move(stream); }
  Sent send(MemberHandle to, const Batch& batch, Deadline) override {
    ++sent;
    if (out_of_reach.contains(to)) return Sent::retry;
    Request head = request(batch.is_withdraw ? Op::withdraw : Op::publish, 0, batch.keys.size());
    if (batch.is_fresh) head.flags = kFresh;
    if (!send_bytes(streams_.at(to), announced(head, batch.from, batch.keys))) return Sent::retry;
    const PeerAnswer answer = receive_peer_answer(streams_.at(to));
    if (loses_answers > 0) {
      --loses_answers;
      return Sent::retry;
    }
    switch (static_cast<Refusal>(answer.head.failed)) {
      case Refusal::none:
        return Sent::ok;
      case Refusal::gap:
      case Refusal::not_here:
        return Sent::gap;
      case Refusal::stale:
        return Sent::gone;
      default:
        return Sent::retry;
    }
  }
  std::set<MemberHandle> out_of_reach;
  int loses_answers = 0;  // what was sent arrives all the same
  std::uint64_t sent = 0;

 private:
  std::map<MemberHandle, Descriptor> streams_;
};

// The members that hold the key, as this part of the directory says.
inline std::set<Hash128> located(DirectoryService& shard, const DirectoryKey& key) {
  Located found;
  shard.locate({&key, 1}, found);
  std::set<Hash128> ids;
  for (const std::uint16_t each : found.holders[0])
    if (each != kNoHolder) ids.insert(found.names[each].id);
  return ids;
}

}  // namespace kvpool::test
