#include "net/shm_client.h"

#include <poll.h>

#include <algorithm>
#include <new>

namespace kvpool {
namespace {

using namespace std::chrono_literals;

// What an ordinary request passes its payload through. Large enough that a wake-up costs little,
// small enough that both sides find it in the cache. Half of the staging memory at most, so that
// blocks can be made in place as well.
constexpr std::uint64_t kWindowBytes = 1 << 20;
constexpr auto kLookEvery = 20ms;
constexpr auto kLostLook = 2ms;  // while some lane is lost: nobody tells when it is found again

std::uint64_t window_bytes(const ShmOffer& offer) {
  const std::uint64_t share = offer.staging_bytes / 2 / offer.lanes / kPageBytes * kPageBytes;
  return std::max(kLaneWindowMin,
                  std::min(share, kWindowBytes + on_page(lane_key_bytes(kKeysPerLane, true))));
}

std::unexpected<Error> foreign(const std::string& what) {
  return fail(Code::refused, "the node's " + what);
}

}  // namespace

Result<std::shared_ptr<ShmClient>> ShmClient::create(const ShmOffer& offer, int socket) {
  const auto let_go = [](ShmClient* gone) {
    if (!gone->is_forked()) delete gone;
  };
  auto client = std::shared_ptr<ShmClient>(new ShmClient(Descriptor(socket)), let_go);
  std::vector<Descriptor> files;
  files.reserve(offer.descriptors.size());
  for (const int number : offer.descriptors) files.emplace_back(number);
  if (auto mapped = client->map(offer, std::move(files)); !mapped)
    return std::unexpected(mapped.error());
  return client;
}

Result<void> ShmClient::map(const ShmOffer& offer, std::vector<Descriptor> files) {
  if (offer.lanes == 0 || offer.lanes > kLanesMax || files.size() != offer.lanes + 4)
    return foreign("offer of shared memory has " + std::to_string(files.size()) +
                   " descriptors for " + std::to_string(offer.lanes) + " lanes");
  using Access = SharedMemory::Access;
  const struct {
    SharedMemory& memory;
    std::uint64_t bytes;
    Access access;
  } parts[] = {{arena_, offer.arena_bytes, Access::read},
               {index_, offer.index_bytes, Access::read},
               {control_, control_bytes(offer.lanes), Access::write},
               {staging_, offer.staging_bytes, Access::write}};
  for (std::size_t i = 0; i < std::size(parts); ++i) {
    auto mapped = SharedMemory::map(files[i], parts[i].bytes, parts[i].access);
    if (!mapped) return std::unexpected(mapped.error());
    parts[i].memory = std::move(*mapped);
  }
  view_ = {index_.base(), arena_.base()};
  if (auto good = check_index(); !good) return good;
  if (auto good = check_control(offer); !good) return good;
  reader_.emplace(view_);
  page_ = reinterpret_cast<ClientPage*>(control_.base() + kPageOffset);
  hazards_.emplace(page_->hazards);
  pin_bytes_ = offer.pin_bytes;
  return make_lanes(offer, files);
}

Result<void> ShmClient::check_index() const {
  if (index_.bytes() < kRecordsOffset) return foreign("index is too small");
  const IndexHeader& header = view_.header();
  if (header.magic != kIndexMagic) return foreign("index is none");
  if (header.version != kIndexVersion)
    return foreign("index has version " + std::to_string(header.version) + ", not " +
                   std::to_string(kIndexVersion));
  const auto holds = [&](std::uint64_t offset, std::uint64_t count, std::uint64_t size) {
    return offset % 64 == 0 && offset <= index_.bytes() &&
           count <= (index_.bytes() - offset) / size;
  };
  if (header.buckets_log2_max >= 40 ||
      !holds(header.records_offset, header.records_max, sizeof(Record)) ||
      !holds(header.tables_offset, 2ull << header.buckets_log2_max, sizeof(Bucket)))
    return foreign("index does not lie inside its file");
  if (header.arena_bytes != arena_.bytes()) return foreign("index is of another arena");
  return {};
}

Result<void> ShmClient::check_control(const ShmOffer& offer) const {
  const auto& header = *reinterpret_cast<const ControlHeader*>(control_.base());
  if (header.magic != kControlMagic || header.version != kControlVersion ||
      header.lanes != offer.lanes || header.staging_bytes != offer.staging_bytes ||
      header.page_offset != kPageOffset || header.lanes_offset != kLanesOffset ||
      header.lane_bytes != kLaneBytes)
    return foreign("control memory has another layout");
  return {};
}

Result<void> ShmClient::make_lanes(const ShmOffer& offer, std::vector<Descriptor>& files) {
  room_.emplace(offer.staging_bytes);
  lanes_.resize(offer.lanes);
  for (std::uint32_t i = 0; i < offer.lanes; ++i) {
    ClientLane& lane = lanes_[i];
    lane.shared = reinterpret_cast<Lane*>(control_.base() + kLanesOffset + i * kLaneBytes);
    lane.bell = std::move(files[4 + i]);
    lane.window = room_->take(window_bytes(offer));
    if (!lane.window)
      return fail(Code::refused, "staging memory of " + std::to_string(offer.staging_bytes) +
                                     " bytes is too small for " + std::to_string(offer.lanes) +
                                     " lanes");
    room_->keep(lane.window.bytes());
    free_.push_back(&lane);
  }
  return {};
}

bool ShmClient::may_pin(std::uint64_t bytes) {
  if (pinned_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= pin_bytes_) return true;
  unpinned(bytes);
  return false;
}

void ShmClient::break_off() {
  broken_.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
  }
  lane_free_.notify_all();
}

bool ShmClient::look() { return wait_until_broken(Deadline{}); }

bool ShmClient::wait_until_broken(Deadline deadline) {
  while (!is_broken()) {
    // In slices, since break_off() does not wake a poll.
    const auto left = deadline - std::chrono::steady_clock::now();
    const auto slice = std::clamp<std::chrono::nanoseconds>(left, 0ms, kLookEvery);
    pollfd end{socket_.get(), POLLIN | POLLRDHUP, 0};
    const int ready = poll(&end, 1, static_cast<int>((slice + 999'999ns) / 1ms));
    // The node never says anything here, so whatever there is to read is its end.
    if (ready > 0) break_off();
    if (ready == 0 && left <= 0ms) break;
  }
  return is_broken();
}

ClientLane* ShmClient::take_lane(Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (is_broken()) return nullptr;
    find_lanes(lock);
    if (!free_.empty()) {
      ClientLane* const lane = free_.back();  // used last, so its lines are in the cache
      free_.pop_back();
      return lane;
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return nullptr;
    lane_free_.wait_until(lock, std::min(deadline, now + (lost_.empty() ? kLookEvery : kLostLook)));
    lock.unlock();
    look();
    lock.lock();
  }
}

void ShmClient::find_lanes() { find_lanes(std::unique_lock(mutex_)); }

void ShmClient::find_lanes(const std::unique_lock<std::mutex>&) {
  std::erase_if(lost_, [&](ClientLane* lane) {
    if (!lane->is_answered()) return false;
    lane->used = {};
    free_.push_back(lane);
    return true;
  });
}

void ShmClient::give_lane(ClientLane* lane) {
  const bool is_free = lane->is_answered();
  if (is_free) lane->used = {};
  {
    const std::lock_guard lock(mutex_);
    (is_free ? free_ : lost_).push_back(lane);
  }
  lane_free_.notify_one();
}

}  // namespace kvpool
