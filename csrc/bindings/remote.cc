// A node elsewhere, as a client reaches it: over streams, and on the same host through memory as
// well. Python makes the handshakes and hands the descriptors over.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <mutex>
#include <utility>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "net/shm_channel.h"
#include "net/stream_channel.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

// From the end of a node's last stream to that of its shared memory, which one process's end closes
// in one go.
constexpr auto kMemoryFollows = std::chrono::milliseconds(50);

std::uint64_t number_in(const nb::dict& info, const char* name) {
  if (!info.contains(name)) raise_bad_argument(std::string("the offer names no ") + name);
  return nb::cast<std::uint64_t>(info[name]);
}

class Remote {
 public:
  Remote(std::chrono::milliseconds timeout, bool on_this_host)
      : streams_(value_or_raise(
            StreamChannel::create({.timeout = timeout, .leases_in_place = on_this_host}))) {
    if (on_this_host)
      memory_ = std::make_shared<ShmChannel>(streams_, ShmChannelOptions{.call_time_max = timeout});
  }

  bool is_forked() const { return streams_->is_forked(); }
  bool is_closed() const { return streams_->is_closed(); }
  bool is_broken() const { return streams_->is_broken() || (memory_ && memory_->is_broken()); }
  // A node that died takes all its sockets with it: then who reads its memory is told, too.
  bool wait_broken(Deadline deadline) {
    const bool is_lost = streams_->wait_broken(deadline);
    if (memory_ && is_lost)
      memory_->wait_until_broken(std::chrono::steady_clock::now() + kMemoryFollows);
    return is_lost || is_broken();
  }
  StreamChannel& streams() { return *streams_; }
  ShmChannel* memory() { return memory_.get(); }

  void close() {
    if (memory_) memory_->close();
    streams_->close();
  }

  // Numbers belong to a life of the node: nothing of the old one may be left when they change.
  void attach(const std::vector<int>& streams, std::shared_ptr<ShmClient> client,
              const std::vector<std::pair<Hash128, std::uint32_t>>& numbers) {
    streams_->detach();
    if (memory_) memory_->detach();
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(spaces_, [](const auto& space) { return space.expired(); });
      for (const auto& known : spaces_) {
        const auto space = known.lock();
        if (!space) continue;
        for (const auto& [id, number] : numbers)
          if (id == space->id) space->number.store(number, std::memory_order_release);
      }
    }
    value_or_raise(streams_->attach(streams));
    if (client) memory_->attach(std::move(client));
  }

  Opened add_space(const Hash128& id, std::uint32_t block_bytes, std::uint32_t number) {
    auto space = std::make_shared<Space>();
    space->id = id;
    space->block_bytes = block_bytes;
    space->number = number;
    {
      const std::lock_guard lock(mutex_);
      spaces_.push_back(space);
    }
    std::shared_ptr<Channel> channel = streams_;
    if (memory_) channel = memory_;
    return {{std::move(channel), std::move(space)}};
  }

 private:
  std::shared_ptr<StreamChannel> streams_;
  std::shared_ptr<ShmChannel> memory_;  // nullptr: the node is on another host
  std::mutex mutex_;                    // guards spaces_
  std::vector<std::weak_ptr<Space>> spaces_;
};

Hash128 id_of(const nb::bytes& id) {
  if (id.size() != kHashBytes)
    raise_bad_argument("a namespace id has 16 bytes, not " + std::to_string(id.size()));
  return Hash128::from_bytes(id.c_str());
}

using Facts = nb::typed<nb::dict, nb::str, nb::any>;
using Shm = nb::typed<nb::tuple, nb::int_, std::vector<int>, Facts>;
using Numbers = nb::typed<nb::dict, nb::bytes, nb::int_>;

// What was handed over is closed, whatever fails; release() what somebody else takes over.
class Owned {
 public:
  explicit Owned(std::vector<int> numbers) : numbers_(std::move(numbers)) {}
  ~Owned() {
    for (const int number : numbers_) close(number);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  std::vector<int> release() { return std::exchange(numbers_, {}); }

 private:
  std::vector<int> numbers_;
};

std::shared_ptr<ShmClient> client_of(Remote& remote, const std::optional<Shm>& shm) {
  Owned socket(shm ? std::vector{nb::cast<int>((*shm)[0])} : std::vector<int>());
  Owned files(shm ? nb::cast<std::vector<int>>((*shm)[1]) : std::vector<int>());
  if (!shm) {
    if (remote.memory() != nullptr) raise_bad_argument("this channel needs memory to share");
    return nullptr;
  }
  if (remote.memory() == nullptr) raise_bad_argument("this channel shares no memory");
  const nb::dict info = nb::cast<nb::dict>((*shm)[2]);
  ShmOffer offer;
  offer.lanes = static_cast<std::uint32_t>(number_in(info, "lanes"));
  offer.staging_bytes = number_in(info, "staging_bytes");
  offer.arena_bytes = number_in(info, "arena_bytes");
  offer.index_bytes = number_in(info, "index_bytes");
  offer.pin_bytes = number_in(info, "pin_bytes");
  offer.descriptors = files.release();
  return value_or_raise(ShmClient::create(offer, socket.release().front()));
}

void attach(Remote& remote, const std::vector<int>& streams, const std::optional<Shm>& shm,
            const Numbers& numbers) {
  Owned owned(streams);
  std::vector<std::pair<Hash128, std::uint32_t>> pairs;
  for (const auto& [id, number] : numbers)
    pairs.emplace_back(id_of(nb::cast<nb::bytes>(id)), nb::cast<std::uint32_t>(number));
  auto client = client_of(remote, shm);
  const GilReleased released;
  remote.attach(owned.release(), std::move(client), pairs);
}

Facts stats(Remote& remote) {
  Facts d;
  d["live_streams"] = remote.streams().live();
  d["wait_connections"] = remote.streams().wait_connections();
  d["shares_memory"] = remote.memory() != nullptr && !remote.memory()->is_broken();
  return d;
}

}  // namespace

void bind_remote(nb::module_& m) {
  nb::class_<Remote>(m, "Remote", "How a node elsewhere is reached. Thread-safe.")
      .def_static(
          "create",
          [](nb::handle timeout_s, bool shm) {
            const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
                deadline_after(timeout_s) - std::chrono::steady_clock::now());
            auto remote =
                std::make_unique<Remote>(std::max(timeout, std::chrono::milliseconds(1)), shm);
            // In a child its locks may be held for ever, and the sockets are the parent's.
            return std::shared_ptr<Remote>(remote.release(), [](Remote* r) {
              if (r->is_forked()) return;
              const GilReleased released;
              delete r;
            });
          },
          "timeout_s"_a, "shm"_a = false)
      .def(
          "attach", &attach, "streams"_a, "shm"_a.none(), "numbers"_a,
          "Take over connected sockets, and (socket, descriptors, info) of a shared memory offer;\n"
          "numbers: namespace id -> the node's number. All descriptors are the channel's from "
          "here\n"
          "on, also on failure. Ends what was attached before.")
      .def(
          "add_stream",
          [](Remote& remote, int descriptor) { value_or_raise(remote.streams().add(descriptor)); },
          "descriptor"_a, "One more, in place of one that was lost.")
      .def(
          "add_wait_connection",
          [](Remote& remote, int descriptor) {
            value_or_raise(remote.streams().add_wait_connection(descriptor));
          },
          "descriptor"_a, "For one more wait() at a time.")
      .def_prop_ro("wait_connections",
                   [](Remote& remote) { return remote.streams().wait_connections(); })
      .def("stats", &stats)
      .def_prop_ro("live_streams", [](Remote& remote) { return remote.streams().live(); })
      .def(
          "wait_broken",
          [](Remote& remote, nb::handle timeout_s) {
            const auto deadline = deadline_after(timeout_s);
            const GilReleased released;
            return remote.wait_broken(deadline);
          },
          "timeout_s"_a, "Sleep until a connection is lost (True) or the time is over.")
      .def(
          "add_space",
          [](Remote& remote, const nb::bytes& id, std::uint32_t block_bytes, std::uint32_t number) {
            return remote.add_space(id_of(id), block_bytes, number);
          },
          "id"_a, "block_bytes"_a, "number"_a)
      .def("close",
           [](Remote& remote) {
             const GilReleased released;
             remote.close();
           })
      .def_prop_ro("is_closed", &Remote::is_closed)
      .def_prop_ro("is_forked", &Remote::is_forked)
      .def_prop_ro("is_broken", &Remote::is_broken);
}

}  // namespace kvpool
