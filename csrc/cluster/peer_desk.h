// What peers ask of this member, and who answers: its shard of the directory, and its puller. Says
// along with every answer how much the member has to do.
//
// Thread rule: as DirectoryService; set_load() by any thread.
#pragma once
#include <atomic>
#include <memory>
#include <utility>

#include "cluster/directory_shard.h"
#include "cluster/puller.h"

namespace kvpool {

class PeerDesk final : public DirectoryService {
 public:
  PeerDesk(std::shared_ptr<DirectoryShard> shard, std::shared_ptr<Puller> puller)
      : shard_(std::move(shard)), puller_(std::move(puller)) {}

  Told publish(const Announcement& from, std::span<const Hash128> keys, bool is_fresh) override {
    return shard_->publish(from, keys, is_fresh);
  }
  Told withdraw(const Announcement& from, std::span<const Hash128> keys) override {
    return shard_->withdraw(from, keys);
  }
  void locate(std::span<const Hash128> keys, Located& found) override {
    shard_->locate(keys, found);
  }
  PullAnswer pull(const PullHead& head, std::span<const Hash128> keys, bool are_last) override {
    return puller_->ask(head, keys, are_last);
  }
  MemberLoad load() const override { return load_.load(std::memory_order_relaxed); }
  std::uint64_t lane() const override { return lane_.load(std::memory_order_relaxed); }
  void set_lane(std::uint64_t number) { lane_.store(number, std::memory_order_relaxed); }
  void set_load(MemberLoad load) { load_.store(load, std::memory_order_relaxed); }

 private:
  const std::shared_ptr<DirectoryShard> shard_;
  const std::shared_ptr<Puller> puller_;
  std::atomic<MemberLoad> load_{MemberLoad{}};
  std::atomic<std::uint64_t> lane_{0};
};

}  // namespace kvpool
