// SHA-256 gives the published digests on every path, however the message is cut.
#include <algorithm>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "block/sha256.h"
#include "block_random.h"

namespace kvpool {
namespace {

std::vector<Sha256Path> paths() {
  std::vector<Sha256Path> all = {Sha256Path::portable};
  if (cpu_features().sha) {
    all.push_back(Sha256Path::sha_ni);
  } else {
    MESSAGE("this processor has no SHA instructions: only the portable path is tested");
  }
  return all;
}

std::string sha256_hex(Sha256Path path, const std::string& message) {
  Sha256 sha(path);
  sha.update(message.data(), message.size());
  return test::hex(sha.finish());
}

TEST_CASE("sha256: the digests of FIPS 180-4") {
  for (const Sha256Path path : paths()) {
    CHECK(sha256_hex(path, "") ==
          "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(sha256_hex(path, "abc") ==
          "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(sha256_hex(path, "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(sha256_hex(path,
                     "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                     "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu") ==
          "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    CHECK(sha256_hex(path, std::string(1'000'000, 'a')) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

TEST_CASE("sha256: paths agree on every length, and pieces on every cut") {
  test::Random random("sha256");
  for (std::size_t length = 0; length <= 300; ++length) {
    const auto message = random.bytes(length);
    std::vector<std::string> digests;
    for (const Sha256Path path : paths()) {
      Sha256 whole(path);
      whole.update(message.data(), length);
      digests.push_back(test::hex(whole.finish()));

      Sha256 cut(path);
      cut.update("spent", 5);
      cut.reset();
      for (std::size_t at = 0; at < length;) {
        const std::size_t piece =
            random.between<std::size_t>(0, std::min<std::size_t>(100, length - at));
        cut.update(message.data() + at, piece);
        at += piece;
      }
      digests.push_back(test::hex(cut.finish()));
    }
    for (const auto& digest : digests) REQUIRE(digest == digests.front());
  }
}

TEST_CASE("sha256: the short form is the first half of the digest") {
  Sha256 sha;
  sha.update("abc", 3);
  std::array<unsigned char, 16> bytes;
  sha.finish128().to_bytes(bytes.data());
  CHECK(test::hex(bytes) == "ba7816bf8f01cfea414140de5dae2223");
}

}  // namespace
}  // namespace kvpool
