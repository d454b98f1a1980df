// A writer of its own on a real tier: groups of all kinds, on a tier that is kept nearly full, so
// that an extent that comes free is written again at once. It may break the rule of when.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "disk.h"
#include "expected.h"
#include "memory/slab_pool.h"
#include "tier/ssd.h"

namespace kvpool::test {

enum class Reuse : std::uint8_t {
  after_commit,       // of the group that deletes
  after_next_commit,  // what `relaxed` needs
  before_commit,      // wrong under any contract
};

class TierLoad {
 public:
  TierLoad(const SsdOptions& options, Reuse reuse, std::uint64_t seed);

  // One group. The tier must take it.
  void step();
  // Closes and opens the tier; what it shows must be what was committed.
  void reopen();
  // Commits after which the index was not what the group says.
  std::uint64_t differing() const { return differing_; }

 private:
  struct Block {
    std::uint32_t space = 0;
    SsdPlace place;
    ClassId klass = 0;
    Hash128 sum;
  };
  struct Buffer {
    explicit Buffer(std::uint64_t bytes);
    std::unique_ptr<std::byte, void (*)(void*)> at;
  };
  using Blocks = std::map<KeyBytes, Block>;

  void open();
  void change_spaces(SsdGroup& group);
  void add_deletes(SsdGroup& group);
  void add_moves(SsdGroup& group);
  void add_writes(SsdGroup& group);
  void add_stamps(SsdGroup& group);
  void erase(SsdGroup& group, Blocks::iterator block);
  bool add_write(SsdGroup& group, const BlockKey& key, ClassId klass, std::uint64_t seed);
  void leave(const SsdPlace& place);
  void give_back();
  bool expect_commit(const SsdGroup& group);
  Blocks::iterator any_block();

  const SsdOptions options_;
  const Reuse reuse_;
  Dice dice_;
  std::unique_ptr<Ssd> ssd_;
  std::unique_ptr<SlabPool> slots_;
  std::vector<ClassId> classes_;
  Blocks blocks_;
  std::vector<std::uint32_t> spaces_;
  std::vector<KeyBytes> deleted_, changed_;  // in this group
  std::vector<Buffer> buffers_;              // of this group
  std::vector<SsdPlace> left_, left_before_;
  std::uint32_t next_space_ = 1;
  std::uint64_t next_seed_ = 1, groups_ = 0, differing_ = 0;
  IndexState model_;
};

}  // namespace kvpool::test
