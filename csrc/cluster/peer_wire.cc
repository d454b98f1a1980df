#include "cluster/peer_wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "net/socket_io.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr auto kBusyMax = std::chrono::milliseconds(50);

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

// A batch on its way, and its answer.
struct PeerWire::Letter {
  Letter(Parcel& what, std::shared_ptr<Peer> whose) : parcel(what), peer(std::move(whose)) {}
  Letter(const Letter&) = delete;
  Letter& operator=(const Letter&) = delete;
  ~Letter() {
    if (id == 0) return;  // else no memory: what still comes belongs to nobody
    stream().abandon();
    peer->not_asked();
  }

  Parcel& parcel;
  const std::shared_ptr<Peer> peer;
  std::optional<StreamPool::Loan> loan;  // after `peer`: it is given back to that
  std::uint64_t id = 0;                  // 0: it is not on its way
  steady_clock::time_point began = steady_clock::now();
  Answer answer;
  std::size_t bytes = 0;  // of the answer, that have come

  StreamClient& stream() const { return loan->one(); }
  steady_clock::duration waited() const { return steady_clock::now() - began; }
  bool send(StreamPool::Loan lent, Deadline deadline);
  bool take();
  bool is_whole() const { return bytes == sizeof answer; }
  bool fits() const {
    return answer.magic == kAnswerMagic && answer.version == kFrameVersion && answer.id == id &&
           answer.op == (parcel.batch.is_withdraw ? Op::withdraw : Op::publish) &&
           answer.count <= parcel.batch.keys.size() && answer.body_bytes == 0;
  }
};

bool PeerWire::Letter::send(StreamPool::Loan lent, Deadline deadline) {
  loan.emplace(std::move(lent));
  began = steady_clock::now();
  const Batch& batch = parcel.batch;
  id = stream().start_get({.op = batch.is_withdraw ? Op::withdraw : Op::publish,
                           .keys = batch.keys,
                           .deadline = deadline,
                           .from = &batch.from,
                           .is_fresh = batch.is_fresh});
  return id != 0;
}

// True: it is over, whether the answer is whole or not.
bool PeerWire::Letter::take() {
  auto* at = reinterpret_cast<std::byte*>(&answer);
  while (bytes < sizeof answer) {
    const ssize_t got =
        recv(stream().descriptor(), at + bytes, sizeof answer - bytes, MSG_DONTWAIT);
    if (got > 0) bytes += static_cast<std::size_t>(got);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  }
  return true;
}

Sent PeerWire::send(MemberHandle to, const Batch& batch, Deadline deadline) {
  Parcel parcel{.to = to, .batch = batch};
  send_all({&parcel, 1}, deadline);
  return parcel.sent;
}

Sent PeerWire::tell_own(const Batch& batch) {
  return sent_of(batch.is_withdraw ? own_.withdraw(batch.from, batch.keys)
                                   : own_.publish(batch.from, batch.keys, batch.is_fresh));
}

Sent PeerWire::unreached() {
  count(unreached_);
  return Sent::retry;
}

void PeerWire::send_all(std::span<Parcel> parcels, Deadline deadline) {
  Letters letters;
  for (Parcel& each : parcels) begin(letters, each, deadline);
  begin_busy(letters, deadline);
  std::vector<pollfd> ready;
  while (!letters.empty()) {
    ready.clear();
    for (const auto& each : letters)
      ready.push_back({.fd = each->stream().descriptor(), .events = POLLIN, .revents = 0});
    const int ms = poll_ms(deadline);  // 0: a last look
    poll(ready.data(), ready.size(), ms);
    for (std::size_t i = letters.size(); i-- > 0;) {
      const bool is_over = ready[i].revents != 0 && letters[i]->take();
      if (!is_over && ms > 0) continue;
      end(*letters[i], is_over);
      letters.erase(letters.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

// Those whose streams others use stay in `letters` without one.
void PeerWire::begin(Letters& letters, Parcel& parcel, Deadline deadline) {
  parcel.sent = Sent::retry;
  if (held_.load(std::memory_order_acquire)) return;
  if (parcel.to == members_.now()->self) {
    parcel.sent = tell_own(parcel.batch);
    return;
  }
  auto peer = peers_.of(parcel.to);
  if (peer == nullptr) {
    parcel.sent = Sent::gone;
    return;
  }
  auto letter = std::make_unique<Letter>(parcel, peer);
  bool is_busy = false;
  if (letter->began >= deadline || !peer->may_ask()) {
    parcel.sent = unreached();
    return;
  }
  auto loan = peer->try_short(is_busy);
  if (loan.empty() && !is_busy) {
    peer->not_asked();
    parcel.sent = unreached();
  } else if (loan.empty() || letter->send(std::move(loan), deadline)) {
    letters.push_back(std::move(letter));
  } else {
    peer->failed(Miss::disconnected);
    parcel.sent = unreached();
  }
}

// They are waited for, all together, for a moment only: the others have answers to be taken.
void PeerWire::begin_busy(Letters& letters, Deadline deadline) {
  const auto until = std::min(deadline, steady_clock::now() + kBusyMax);
  std::erase_if(letters, [&](const auto& letter) {
    if (letter->id != 0) return false;
    bool late = false;
    auto loan = letter->peer->borrow_short(until, late);
    if (loan.empty()) {
      letter->peer->not_asked();
      letter->parcel.sent = late ? Sent::busy : unreached();
      return true;
    }
    if (letter->send(std::move(loan), deadline)) return false;
    letter->peer->failed(Miss::disconnected);
    letter->parcel.sent = unreached();
    return true;
  });
}

// `is_over`: else the deadline has come.
void PeerWire::end(Letter& letter, bool is_over) {
  const bool is_good = is_over && letter.is_whole() && letter.fits();
  letter.id = 0;
  if (is_good) {
    const auto refusal = static_cast<Refusal>(letter.answer.failed);
    if (refusal == Refusal::draining) letter.stream().abandon();  // it closes this one
    letter.peer->succeeded(letter.waited());
    letter.peer->note_load(letter.answer.load);
    letter.parcel.sent = answered(refusal, letter.parcel.batch);
    return;
  }
  letter.stream().abandon();
  letter.peer->failed(!is_over            ? Miss::timed_out
                      : letter.is_whole() ? Miss::damaged
                                          : Miss::disconnected,
                      letter.waited());
  letter.parcel.sent = unreached();
}

Sent PeerWire::answered(Refusal refusal, const Batch& batch) {
  const Sent sent = sent_of(refusal);
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
