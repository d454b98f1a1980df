#include "net/stream_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

namespace kvpool {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

Result<std::shared_ptr<StreamClient>> StreamClient::create(int descriptor) {
  Descriptor socket(descriptor);
  bool is_unix = false;
  if (auto ready = prepare_stream(socket.get(), is_unix); !ready)
    return std::unexpected(ready.error());
  return std::shared_ptr<StreamClient>(new StreamClient(std::move(socket)));
}

void StreamClient::abandon() {
  live_.store(false, std::memory_order_release);
  shutdown(socket_.get(), SHUT_RDWR);
}

StreamClient::Reply StreamClient::end(Io how) {
  abandon();
  return {.how = how};
}

Request StreamClient::head_of(const Ask& ask) {
  const auto left = std::chrono::ceil<milliseconds>(ask.deadline - steady_clock::now()).count();
  const auto ms = std::clamp<std::int64_t>(left, 1, kDeadlineMaxMs);
  const auto flag = [](bool is_set, std::uint16_t bit) { return is_set ? bit : std::uint16_t{0}; };
  return {.op = ask.op,
          .flags = static_cast<std::uint16_t>(
              flag(ask.parent != nullptr, kHasParent) | flag(ask.is_part, kIsPart) |
              flag(ask.is_fresh, kFresh) | flag(ask.are_last, kLastCopies)),
          .id = next_id_++,
          .space = ask.space,
          .count = static_cast<std::uint32_t>(ask.keys.size()),
          .skip = ask.skip,
          .deadline_ms = static_cast<std::uint32_t>(ms)};
}

Io StreamClient::send_request(const Ask& ask, Request& head) {
  head = head_of(ask);
  std::array<iovec, 4> pieces{
      iovec{&head, sizeof head},
      iovec{const_cast<Announcement*>(ask.from), ask.from != nullptr ? sizeof *ask.from : 0},
      iovec{const_cast<PullHead*>(ask.pull), ask.pull != nullptr ? sizeof *ask.pull : 0},
      iovec{const_cast<Hash128*>(ask.keys.data()), ask.keys.size_bytes()}};
  std::uint64_t moved = 0;
  return send_all(socket_.get(), pieces, until(ask.deadline), moved);
}

Io StreamClient::take(std::span<std::byte> to, const Patience& patience) {
  while (!to.empty()) {
    const iovec piece{to.data(), to.size()};
    std::size_t got = 0;
    if (const Io how = receive_some(socket_.get(), {&piece, 1}, patience, got); how != Io::done)
      return how;
    to = to.subspan(got);
  }
  return Io::done;
}

StreamClient::Reply StreamClient::take_answer(const Request& head, std::span<std::byte> body,
                                              const Patience& patience) {
  Answer answer;
  if (const Io how = take(std::as_writable_bytes(std::span(&answer, 1)), patience); how != Io::done)
    return end(how);
  const bool fits = answer.magic == kAnswerMagic && answer.version == kFrameVersion &&
                    answer.op == head.op && answer.id == head.id && answer.count <= head.count &&
                    answer.miss < kMisses && answer.body_bytes <= body.size();
  if (!fits) return end(Io::closed);
  if (const Io how = take(body.first(answer.body_bytes), patience); how != Io::done)
    return end(how);
  const auto refusal = static_cast<Refusal>(answer.failed);
  // The node goes, or is another than the one that gave the number: neither gets better here.
  if (refusal == Refusal::draining || refusal == Refusal::no_space) abandon();
  return {.how = Io::done,
          .refusal = refusal,
          .why = static_cast<Miss>(answer.miss),
          .count = answer.count,
          .body_bytes = answer.body_bytes,
          .load = answer.load};
}

StreamClient::Reply StreamClient::request(const Ask& ask, std::span<std::byte> body,
                                          milliseconds grace) {
  if (is_late(ask.deadline + grace)) return {.how = Io::late};
  Request head;
  if (const Io how = send_request(ask, head); how != Io::done) return end(how);
  return take_answer(head, body, until(ask.deadline + grace));
}

std::uint64_t StreamClient::start_get(const Ask& ask) {
  Request head;
  if (send_request(ask, head) == Io::done) return head.id;
  abandon();
  return 0;
}

}  // namespace kvpool
