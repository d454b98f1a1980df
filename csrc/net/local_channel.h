// The channel to a node in this process: a call.
#pragma once
#include <memory>

#include "net/channel.h"

namespace kvpool {

class LocalChannel final : public Channel {
 public:
  explicit LocalChannel(std::shared_ptr<Node> node) : node_(std::move(node)) {}

  bool is_forked() const override { return node_->is_forked(); }
  bool is_closed() const override { return node_->is_closed(); }
  bool looks_up_at_once() const override { return !node_->has_elsewhere(); }
  std::size_t lookup(const Space& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                     Miss& why) override;
  std::size_t get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                  Miss& why) override;
  void put(const PutCall& call, BlockSource& source, PutStatus* statuses) override;
  std::unique_ptr<Pins> acquire(const Space& space, std::span<const Hash128> keys,
                                Miss& why) override;
  std::unique_ptr<Room> reserve(const PutCall& call, PutStatus& status) override;
  std::size_t remove(const Space& space, std::span<const Hash128> keys) override;
  std::size_t wait(const Space& space, std::span<const Hash128> keys, Deadline deadline) override;

 private:
  std::shared_ptr<Node> node_;
};

}  // namespace kvpool
