// A client of a real node with an SSD tier: what is written, deleted, moved and freed, and when, is
// the product's own choice.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "disk.h"
#include "node/node.h"

namespace kvpool::test {

class NodeLoad {
 public:
  NodeLoad(const SsdOptions& options, PolicyKind policy, std::uint64_t seed);
  ~NodeLoad();

  void step();
  void reopen();

  std::uint64_t wrong() const { return wrong_; }        // gets that gave other bytes
  std::uint64_t not_kept() const { return not_kept_; }  // durable puts that were not committed
  std::uint64_t puts() const { return puts_; }
  std::uint64_t hits() const { return hits_; }
  std::uint64_t moves() const { return moves_; }

 private:
  struct Chain {
    std::size_t space = 0;
    std::vector<Hash128> keys;
  };
  struct Space {
    Namespace* at = nullptr;
    std::uint64_t id = 0;
  };

  void open();
  void close();
  void put();
  void get();
  void remove();
  void drop();
  void resize();
  void name_space(Space& space, std::uint64_t id);
  Chain& any_chain() { return chains_[dice_.below(chains_.size())]; }

  const SsdOptions options_;
  const PolicyKind policy_;
  Dice dice_;
  std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  std::unique_ptr<Node> node_;
  std::vector<Space> spaces_;
  std::vector<Chain> chains_;
  std::uint64_t next_key_ = 1, next_space_ = 1;
  std::uint64_t wrong_ = 0, not_kept_ = 0, puts_ = 0, hits_ = 0, moves_ = 0;
};

}  // namespace kvpool::test
