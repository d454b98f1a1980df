// The other process of the UCX tests (net_ucx.h).
#include <cstdlib>
#include <sstream>

#include "net/ucx_lane.h"
#include "net_ucx.h"

namespace kvpool {
namespace {

int hold_arena(const std::string& kind, std::uint64_t bytes, std::uint64_t seed) {
  const auto arena = Arena::create("kvpool-test", bytes, Arena::Kind::sealed);
  if (!arena) return 1;
  test::fill_arena(test::filled_part((*arena)->base(), bytes), seed);
  const auto lane = UcxLane::open(**arena, test::ucx_options(kind));
  if (!lane) return 2;
  const std::span<const std::byte> address = (*lane)->address();
  const auto length = static_cast<std::uint32_t>(address.size());
  if (write(test::kUcxToParent, &length, sizeof length) != sizeof length) return 3;
  if (write(test::kUcxToParent, address.data(), length) != length) return 3;
  char what = 0;
  while (read(test::kUcxFromParent, &what, 1) == 1) {
    test::fill_arena({(*arena)->base(), kUnitBytes}, ~seed);
    if (write(test::kUcxToParent, &what, 1) != 1) return 3;
  }
  return 0;
}

TEST_CASE("ucx peer: holds an arena for the process that made it") {
  const char* told = std::getenv(test::kUcxPeerVariable);
  if (told == nullptr) {
    MESSAGE("nobody has made this process to be a peer");
    CHECK(told == nullptr);
    return;
  }
  std::istringstream parts(told);
  std::string kind, bytes, seed;
  std::getline(parts, kind, ';');
  std::getline(parts, bytes, ';');
  std::getline(parts, seed, ';');
  CHECK(hold_arena(kind, std::stoull(bytes), std::stoull(seed)) == 0);
}

}  // namespace
}  // namespace kvpool
