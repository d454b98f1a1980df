#include "net/stream_serve.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "block/copy.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Read at once while it is not known what comes. Little: payload behind a request that was read
// with it is copied once more.
constexpr std::size_t kHeadBytes = 4096;
constexpr std::size_t kRoomKept = 16 << 10;

constexpr std::size_t kKeysOfAnnouncement = sizeof(Announcement) / kHashBytes;
constexpr std::size_t kKeysOfPull = sizeof(PullHead) / kHashBytes;

// What comes in front of the keys, in keys.
std::size_t keys_before(const Request& head) {
  if (has_announcement(head.op)) return kKeysOfAnnouncement;
  if (head.op == Op::pull) return kKeysOfPull;
  return (head.flags & kHasParent) != 0 ? 1 : 0;
}

std::size_t keys_in(const Request& head) { return head.count + keys_before(head); }

// Nothing came, and the sender asks whether it is still known.
bool may_be_empty(const Request& head) { return head.op == Op::publish; }

}  // namespace

StreamServe::StreamServe(Descriptor socket, bool is_unix, Host host)
    : socket_(std::move(socket)), is_unix_(is_unix), host_(std::move(host)) {
  host_.books.streams.fetch_add(1, std::memory_order_relaxed);
}

StreamServe::~StreamServe() { host_.books.streams.fetch_sub(1, std::memory_order_relaxed); }

Outcome StreamServe::on_ready(std::uint32_t) {
  for (;;) {
    const ssize_t got = gather();
    if (got == 0) return Outcome::close;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Outcome::again : Outcome::close;
    if (!serve_gathered()) return Outcome::close;
    // What the kernel has makes the source ready again.
    if (gathered() > 0) continue;
    forget_room();
    return Outcome::again;
  }
}

// As read(2): 0 = the end, below 0 = errno.
ssize_t StreamServe::gather() {
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, gathered());
    end_ -= begin_;
    begin_ = 0;
  }
  const std::size_t room = std::max(kHeadBytes, wanted_);
  if (buffer_.size() < room) buffer_.resize(room);
  const ssize_t got = recv(socket_.get(), buffer_.data() + end_, room - end_, MSG_DONTWAIT);
  if (got <= 0) return got;
  end_ += static_cast<std::size_t>(got);
  count_in(static_cast<std::uint64_t>(got));
  return got;
}

// A stream that does nothing keeps little, whatever its last request was.
void StreamServe::forget_room() {
  begin_ = end_ = 0;
  if (buffer_.size() > kRoomKept) std::vector<std::byte>().swap(buffer_);
  if (keys_.size() * kHashBytes > kRoomKept) std::vector<Hash128>().swap(keys_);
}

std::size_t StreamServe::take_gathered(std::byte* to, std::uint64_t bytes) {
  const std::byte* from = buffer_.data() + begin_;
  const std::size_t taken = skip_gathered(bytes);
  racy_fill(to, from, taken);  // into a slot: somebody may still be copying what lay there before
  return taken;
}

std::size_t StreamServe::skip_gathered(std::uint64_t bytes) {
  const std::size_t skipped = std::min<std::uint64_t>(bytes, gathered());
  begin_ += skipped;
  return skipped;
}

bool StreamServe::serve_gathered() {
  for (;;) {
    wanted_ = sizeof(Request);
    if (gathered() < sizeof(Request)) return true;
    Request head;
    std::memcpy(&head, buffer_.data() + begin_, sizeof head);
    if (!check(head)) return false;
    wanted_ = sizeof(Request) + keys_in(head) * kHashBytes;
    if (gathered() < wanted_) return true;
    const std::byte* keys = buffer_.data() + begin_ + sizeof(Request);
    begin_ += wanted_;
    if (!serve(head, keys)) return false;
  }
}

bool StreamServe::check(const Request& head) {
  const bool is_put = head.op == Op::put;
  if (head.magic != kRequestMagic) return garbage("what is not a request");
  if (head.version != kFrameVersion)
    return garbage("a request of version " + std::to_string(head.version));
  if (!is_known(head.op))
    return garbage("a request of unknown kind " + std::to_string(static_cast<int>(head.op)));
  if ((head.flags & ~flags_of(head.op)) != 0) return garbage("a request with unknown flags");
  if ((head.count == 0 && !may_be_empty(head)) || head.count > kKeysPerRequest)
    return garbage("a request of " + std::to_string(head.count) + " keys");
  if (head.skip > (is_put ? head.count : 0)) return garbage("a request that skips too much");
  if (is_without_space(head.op) && head.space != 0)
    return garbage("a request between nodes that names a namespace");
  if (head.deadline_ms > kDeadlineMaxMs) return garbage("a request with too late a deadline");
  return true;
}

bool StreamServe::serve(const Request& head, const std::byte* keys) {
  keys_.resize(keys_in(head));
  std::memcpy(keys_.data(), keys, keys_.size() * kHashBytes);
  const std::size_t before = keys_before(head);
  milliseconds limit(head.deadline_ms);
  if (limit == milliseconds(0)) limit = host_.options.request_max;
  if (head.op != Op::wait) limit = std::min(limit, host_.options.request_max);
  Call call{.head = head,
            .space = is_without_space(head.op) ? nullptr : host_.node.space(head.space),
            .keys = std::span(keys_).subspan(before),
            .parent = (head.flags & kHasParent) != 0 ? keys_.data() : nullptr,
            .is_here_only = host_.kind == StreamKind::peer || (head.flags & kHereOnly) != 0,
            .from = {},
            .pull = {},
            .patience = {steady_clock::now() + limit, host_.options.stall_max}};
  if (has_announcement(head.op))
    std::memcpy(static_cast<void*>(&call.from), keys_.data(), sizeof call.from);
  if (head.op == Op::pull)
    std::memcpy(static_cast<void*>(&call.pull), keys_.data(), sizeof call.pull);
  host_.books.requests.fetch_add(1, std::memory_order_relaxed);
  host_.client->requests.fetch_add(1, std::memory_order_relaxed);
  return dispatch(call);
}

Refusal StreamServe::refusal_of(const Call& call) const {
  if (host_.books.draining.load(std::memory_order_relaxed)) return Refusal::draining;
  const bool is_peer = host_.kind == StreamKind::peer;
  const bool leases = call.head.op == Op::acquire || call.head.op == Op::release;
  const bool has_mapped = is_unix_ && host_.client->has_shm.load(std::memory_order_acquire);
  if (leases && !is_peer && !has_mapped) return Refusal::not_here;
  if (is_peer ? !is_for_peers(call.head.op) : is_of_peers(call.head.op)) return Refusal::not_here;
  if (is_without_space(call.head.op)) return Refusal::none;
  if (call.space == nullptr && call.head.op != Op::release) return Refusal::no_space;
  return Refusal::none;
}

bool StreamServe::dispatch(const Call& call) {
  const Op op = call.head.op;
  if (op == Op::put) return put(call);  // looks for a refusal itself: its payload is under way
  const Refusal refusal = refusal_of(call);
  if (refusal != Refusal::none)
    return answer(call, {.refusal = refusal}) && refusal != Refusal::draining;
  switch (op) {
    case Op::lookup:
      return lookup(call);
    case Op::get:
      return get(call);
    case Op::remove:
      return answer(call, {.count = host_.node.remove(*call.space, call.keys)});
    case Op::wait:
      return wait(call);
    case Op::acquire:
      return acquire(call);
    case Op::release:
      return host_.kind == StreamKind::peer ? take_back(call) : release(call);
    case Op::lease_far:
      return lease_far(call);
    case Op::find_space:
    case Op::publish:
    case Op::withdraw:
    case Op::locate:
    case Op::pull:
      return serve_peer(call);
    case Op::put:
      break;
  }
  return false;  // not reached: check() knows all of them
}

Reach StreamServe::reach_of(const Call& call) {
  return call.is_here_only ? Reach::here() : Reach::by(call.patience.deadline);
}

bool StreamServe::lookup(const Call& call) {
  std::vector<std::uint8_t> tiers(call.keys.size());
  Miss why{};
  const Looked looked =
      host_.node.look_far(*call.space, call.keys, tiers.data(), reach_of(call), why);
  if ((call.head.flags & kIsPart) == 0) call.space->traffic->count_lookup(call.keys.size(), looked);
  return answer(call,
                {.count = looked.present, .why = why, .body = std::as_bytes(std::span(tiers))});
}

bool StreamServe::wait(const Call& call) {
  const auto given_up = [this] {
    return host_.books.draining.load(std::memory_order_relaxed) || is_peer_gone(socket_.get());
  };
  const std::size_t found =
      host_.node.wait(*call.space, call.keys, call.patience.deadline, given_up);
  if (is_peer_gone(socket_.get())) return false;
  const bool all = found == call.keys.size();
  const bool drained = !all && host_.books.draining.load(std::memory_order_relaxed);
  const bool in_time = steady_clock::now() < call.patience.deadline;
  Call late = call;  // the answer has a patience of its own: the wait used up that of the request
  late.patience.deadline = steady_clock::now() + host_.options.stall_max;
  return answer(late, {.count = found,
                       .why = all       ? Miss::none
                              : in_time ? Miss::absent
                                        : Miss::timed_out,
                       .refusal = drained ? Refusal::draining : Refusal::none}) &&
         !drained;
}

bool StreamServe::acquire(const Call& call) {
  Miss why{};
  const auto places =
      host_.client->leases.acquire(*call.space, call.keys, host_.options.pin_bytes, why);
  host_.client->views.fetch_add(1, std::memory_order_relaxed);
  host_.client->view_blocks.fetch_add(places.size(), std::memory_order_relaxed);
  if (answer(call, {.count = places.size(),
                    .why = places.size() < call.keys.size() ? why : Miss::none,
                    .body = std::as_bytes(std::span(places))}))
    return true;
  // Nobody has learnt their numbers.
  std::vector<Hash128> numbers;
  for (const LeasePlace& place : places) numbers.push_back({place.lease, 0});
  host_.client->leases.release(numbers);
  return false;
}

bool StreamServe::release(const Call& call) {
  return answer(call, {.count = host_.client->leases.release(call.keys)});
}

Answer StreamServe::answer_head(const Call& call, const Reply& reply) {
  return {.op = call.head.op,
          .miss = static_cast<std::uint8_t>(reply.why),
          .failed = static_cast<std::uint8_t>(reply.refusal),
          .id = call.head.id,
          .count = static_cast<std::uint32_t>(reply.count),
          .body_bytes = static_cast<std::uint32_t>(reply.body.size()),
          .load = reply.load};
}

bool StreamServe::answer(const Call& call, const Reply& reply) {
  Answer head = answer_head(call, reply);
  std::array<iovec, 2> pieces{iovec{&head, sizeof head},
                              iovec{const_cast<std::byte*>(reply.body.data()), reply.body.size()}};
  return send(pieces, call.patience);
}

bool StreamServe::send(std::span<iovec> pieces, const Patience& patience) {
  std::uint64_t moved = 0;
  const Io how = send_all(socket_.get(), pieces, patience, moved);
  host_.books.bytes_out.fetch_add(moved, std::memory_order_relaxed);
  host_.client->bytes_out.fetch_add(moved, std::memory_order_relaxed);
  return ended(how, "take");
}

bool StreamServe::ended(Io how, const char* doing) {
  const std::string who = "client " + std::to_string(host_.client->id);
  if (how == Io::late) host_.books.note_late(who + " did not " + doing + " all bytes in time");
  if (how == Io::stalled) host_.books.note_late(who + " stopped to " + doing + " bytes");
  return how == Io::done;
}

bool StreamServe::garbage(const std::string& what) {
  host_.books.note_garbage("client " + std::to_string(host_.client->id) + " sent " + what);
  return false;
}

void StreamServe::interrupt() { shutdown(socket_.get(), SHUT_RDWR); }

void StreamServe::on_closed() {
  interrupt();
  take_all_back();
}

}  // namespace kvpool
