// Cases that must fail, each under the build that is there to catch its kind of bug.
//
// test_core.py runs them apart from the others and expects the report named beside each: a build
// whose sanitizer is off, or whose findings do not reach the exit status, turns these red.
#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <thread>
#include <vector>

namespace {

// The compiler must not see through the bugs below, or it would refuse or remove them.
template <typename T>
T opaque(T value) {
  volatile T hidden = value;
  return hidden;
}

}  // namespace

TEST_CASE("canary: fails") { CHECK(opaque(1) == 2); }

TEST_CASE("canary: checks nothing") { opaque(1); }

TEST_CASE("canary: reads past the end") {  // AddressSanitizer
  std::vector<char> bytes(opaque<std::size_t>(16));
  CHECK(bytes.data()[opaque<std::size_t>(16)] < 128);
}

TEST_CASE("canary: leaks") {  // LeakSanitizer
  char* volatile lost = new char[opaque<std::size_t>(16)];
  CHECK(lost != nullptr);
  lost = nullptr;
}

TEST_CASE("canary: overflows") {  // UndefinedBehaviorSanitizer
  CHECK(opaque(std::numeric_limits<int>::max()) + opaque(1) != 0);
}

TEST_CASE("canary: races") {  // ThreadSanitizer
  int shared = 0;
  std::thread other([&] { ++shared; });
  ++shared;
  other.join();
  CHECK(shared <= 2);
}
