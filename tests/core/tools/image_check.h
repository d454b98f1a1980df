// Opens what a power cut left with the real tier and looks at all of it, in a child process: where
// LMDB ends the process, or waits for ever, that is one more finding.
#pragma once
#include <cstdint>
#include <string>

#include "expected.h"

namespace kvpool::test {

struct Verdict {  // lies in memory that the child shares
  enum class End : std::uint8_t { complete, refused, crashed, hung } end = End::crashed;
  bool is_a_state = false;
  int commits_lost = 0;
  bool is_promise_kept = false;  // what was there at the last open still is
  std::uint64_t entries = 0;
  std::uint64_t wrong = 0;    // delivered as whole, and not what was put under that key
  std::uint64_t damaged = 0;  // an entry whose payload is not there
  std::uint64_t failed = 0;   // a read that the device refused
  std::uint64_t doubled = 0;  // extents that two entries claim
  std::uint64_t orphans = 0;  // blocks whose parent is not there
  char why[256] = {};         // refused
};

// The image is the caller's to remove. `chains`: a block's parent must be there.
Verdict check_image(const std::string& directory, Durability durability, bool chains);

}  // namespace kvpool::test
