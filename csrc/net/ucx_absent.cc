// Stands for the UCX lane where it was built without UCX's headers: there is none, and it says so.
#include "base/check.h"
#include "net/ucx_lane.h"

namespace kvpool {

// Nothing makes one of these.
class UcxBatch {};
class UcxContext {};
class UcxEndpoint {};
class UcxMemory {};
class UcxWorker {};
struct UcxCounters {};

UcxReading::~UcxReading() = default;
bool UcxReading::wait(std::size_t, Time) { return false; }
void UcxReading::judge(UcxOutcome, std::uint64_t) {}

UcxPeer::~UcxPeer() = default;
std::unique_ptr<UcxReading> UcxPeer::begin(std::span<const UcxPlace>, std::shared_ptr<const void>,
                                           Time) {
  return nullptr;  // there is no peer to ask
}
bool UcxPeer::is_broken() const { return true; }
std::vector<UcxOutcome> UcxPeer::read(std::span<const UcxPlace> places, std::shared_ptr<const void>,
                                      Time) {
  return std::vector<UcxOutcome>(places.size(), UcxOutcome::failed);
}

UcxLane::~UcxLane() = default;
Result<std::unique_ptr<UcxLane>> UcxLane::open(const Arena&, const UcxOptions& options) {
  if (auto good = check(options); !good) return std::unexpected(good.error());
  return fail(Code::refused, "kvpool was built without UCX's headers (Debian: libucx-dev)");
}
Result<std::unique_ptr<UcxPeer>> UcxLane::connect(std::span<const std::byte>, Time) {
  return fail(Code::refused, "there is no UCX lane");
}
UcxTotals UcxLane::totals() const { return {}; }

}  // namespace kvpool
