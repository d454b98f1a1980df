#include "cluster/peer_wire.h"

namespace kvpool {
namespace {

void count(std::atomic<std::uint64_t>& counter, std::uint64_t more = 1) {
  counter.fetch_add(more, std::memory_order_relaxed);
}
std::uint64_t read(const std::atomic<std::uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

Sent sent_of(Told told) {
  switch (told) {
    case Told::ok:
      break;
    case Told::gap:
      return Sent::gap;
    case Told::stale:
      return Sent::gone;
    case Told::full:
      return Sent::retry;
  }
  return Sent::ok;
}

Sent sent_of(Refusal refusal) {
  switch (refusal) {
    case Refusal::none:
      return Sent::ok;
    case Refusal::gap:
    case Refusal::not_here:
      return Sent::gap;
    case Refusal::stale:
      return Sent::gone;
    case Refusal::no_space:
    case Refusal::draining:
    case Refusal::full:
      break;
  }
  return Sent::retry;
}

}  // namespace

Sent PeerWire::send(MemberHandle to, const Batch& batch, Deadline deadline) {
  if (held_.load(std::memory_order_acquire)) return Sent::retry;
  if (to == members_.now()->self) return tell_own(batch);
  const std::shared_ptr<Peer> peer = peers_.of(to);
  return peer ? tell(*peer, batch, deadline) : Sent::gone;
}

Sent PeerWire::tell_own(const Batch& batch) {
  return sent_of(batch.is_withdraw ? own_.withdraw(batch.from, batch.keys)
                                   : own_.publish(batch.from, batch.keys, batch.is_fresh));
}

Sent PeerWire::unreached() {
  count(unreached_);
  return Sent::retry;
}

Sent PeerWire::tell(Peer& peer, const Batch& batch, Deadline deadline) {
  const auto began = std::chrono::steady_clock::now();
  if (began >= deadline || !peer.may_ask()) return unreached();
  bool late = false;
  const StreamPool::Loan loan = peer.borrow_short(deadline, late);
  if (loan.empty()) {
    peer.not_asked();
    return unreached();
  }
  const StreamClient::Ask ask{.op = batch.is_withdraw ? Op::withdraw : Op::publish,
                              .keys = batch.keys,
                              .deadline = deadline,
                              .from = &batch.from,
                              .is_fresh = batch.is_fresh};
  const StreamClient::Reply reply = loan.one().request(ask, {});
  if (reply.how != Io::done) {
    peer.failed(reply.trouble());
    return unreached();
  }
  peer.succeeded(std::chrono::steady_clock::now() - began);
  peer.note_load(reply.load);
  const Sent sent = sent_of(reply.refusal);
  count(sent == Sent::ok ? batches_ : refused_);
  if (sent != Sent::ok) return sent;
  count(keys_, batch.keys.size());
  count(bytes_, sizeof(Request) + sizeof(Announcement) + batch.keys.size_bytes());
  return sent;
}

WireStats PeerWire::stats() const {
  return {.batches = read(batches_),
          .keys = read(keys_),
          .bytes = read(bytes_),
          .unreached = read(unreached_),
          .refused = read(refused_)};
}

}  // namespace kvpool
