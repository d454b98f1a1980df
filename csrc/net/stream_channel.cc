#include "net/stream_channel.h"

#include <poll.h>

#include <algorithm>

namespace kvpool {
namespace {

// A wait that is over is answered at once; so much later there is nobody to answer.
constexpr auto kWaitGrace = std::chrono::milliseconds(500);

std::uint32_t number_of(const Space& space) { return space.number.load(std::memory_order_acquire); }

// Takes all; the first that does not work is the error, and then none is left open.
Result<StreamPool::Streams> open_all(std::span<const int> descriptors) {
  StreamPool::Streams opened;
  Result<void> all{};
  for (const int descriptor : descriptors) {
    auto stream = StreamClient::create(descriptor);
    if (stream)
      opened.push_back(std::move(*stream));
    else if (all)
      all = std::unexpected(stream.error());
  }
  if (!all) return std::unexpected(all.error());
  return opened;
}

}  // namespace

Result<std::unique_ptr<StreamChannel>> StreamChannel::create(const Options& options) {
  auto streams = StreamPool::create();
  if (!streams) return std::unexpected(streams.error());
  auto waits = StreamPool::create();
  if (!waits) return std::unexpected(waits.error());
  return std::unique_ptr<StreamChannel>(
      new StreamChannel(options, std::move(*streams), std::move(*waits)));
}

Result<void> StreamChannel::attach(std::span<const int> descriptors) {
  auto opened = open_all(descriptors);
  if (!opened) return std::unexpected(opened.error());
  waits_->replace({});
  streams_->replace(std::move(*opened));
  return {};
}

Result<void> StreamChannel::add(int descriptor) {
  auto opened = open_all({&descriptor, 1});
  if (!opened) return std::unexpected(opened.error());
  streams_->add(std::move(opened->front()));
  return {};
}

Result<void> StreamChannel::add_wait_connection(int descriptor) {
  auto opened = open_all({&descriptor, 1});
  if (!opened) return std::unexpected(opened.error());
  if (waits_->live() >= kWaitConnections)
    return fail(Code::no_resource, "at most " + std::to_string(kWaitConnections) +
                                       " calls of one client can wait at a time");
  waits_->add(std::move(opened->front()));
  return {};
}

void StreamChannel::detach() {
  streams_->replace({});
  waits_->replace({});
}

// In a child the sockets are its parent's too, and a lock may be held for ever: all of it is left
// as it is, for the end of the process.
StreamChannel::~StreamChannel() {
  close();
  if (!is_forked()) return;
  (void)new std::shared_ptr<StreamPool>(std::move(streams_));
  (void)new std::shared_ptr<StreamPool>(std::move(waits_));
}

void StreamChannel::close() {
  if (is_forked()) return;
  closed_.store(true, std::memory_order_release);
  streams_->close();
  waits_->close();
}

std::size_t StreamChannel::lookup(const Space& space, std::span<const Hash128> keys,
                                  std::uint8_t* tiers, Miss& why) {
  return look({space, keys}, tiers, why);
}

std::size_t StreamChannel::look(const Look& what, std::uint8_t* tiers, Miss& why) {
  const auto& [space, keys, is_part] = what;
  const Deadline deadline = by_timeout();
  why = Miss::absent;
  if (tiers != nullptr) std::fill_n(tiers, keys.size(), std::uint8_t{0});
  if (space.is_lost()) return 0;
  why = Miss::none;
  std::vector<std::byte> body(std::min<std::size_t>(keys.size(), kKeysPerRequest));
  for (std::size_t done = 0; done < keys.size();) {
    bool late = false;
    const auto loan = streams_->borrow(1, deadline, late);
    why = late ? Miss::timed_out : Miss::disconnected;
    if (loan.empty()) return done;
    const auto part = request_of(keys, done);
    const auto reply = loan.one().request({.op = Op::lookup,
                                           .space = number_of(space),
                                           .keys = part,
                                           .deadline = deadline,
                                           .is_part = is_part},
                                          std::span(body).first(part.size()));
    why = reply.is_good() ? reply.why : reply.trouble();
    if (!reply.is_good()) return done;
    if (reply.body_bytes != part.size()) {
      loan.one().abandon();  // what it says fits no request of ours
      why = Miss::disconnected;
      return done;
    }
    if (tiers != nullptr) std::memcpy(tiers + done, body.data(), part.size());
    done += reply.count;
    if (reply.count < part.size()) return done;
  }
  return keys.size();
}

std::size_t StreamChannel::remove(const Space& space, std::span<const Hash128> keys) {
  const Deadline deadline = by_timeout();
  std::size_t removed = 0;
  if (space.is_lost()) return 0;
  for (std::size_t done = 0; done < keys.size();) {
    bool late = false;
    const auto loan = streams_->borrow(1, deadline, late);
    if (loan.empty()) break;
    const auto part = request_of(keys, done);
    const auto reply = loan.one().request(
        {.op = Op::remove, .space = number_of(space), .keys = part, .deadline = deadline}, {});
    if (!reply.is_good()) break;
    removed += reply.count;
    done += part.size();
  }
  return removed;
}

std::size_t StreamChannel::wait(const Space& space, std::span<const Hash128> keys,
                                Deadline deadline, Refusal& refused) {
  refused = Refusal::none;
  if (streams_->live() == 0 || space.is_lost()) return 0;
  std::size_t done = 0;
  while (done < keys.size()) {
    const auto loan = waits_->try_borrow();
    if (loan.empty()) {
      refused = Refusal::not_here;
      return done;
    }
    const auto part = request_of(keys, done);
    const auto reply = loan.one().request(
        {.op = Op::wait, .space = number_of(space), .keys = part, .deadline = deadline}, {},
        std::min(options_.timeout, kWaitGrace));
    if (!reply.is_good()) return done;
    done += reply.count;
    if (reply.count < part.size()) return done;
  }
  return done;
}

std::size_t StreamChannel::wait(const Space& space, std::span<const Hash128> keys,
                                Deadline deadline) {
  Refusal refused{};
  const std::size_t found = wait(space, keys, deadline, refused);
  if (refused == Refusal::none) return found;
  Miss why{};
  return look({space, keys, true}, nullptr, why);
}

}  // namespace kvpool
