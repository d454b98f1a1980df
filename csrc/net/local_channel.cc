#include "net/local_channel.h"

#include "block/checksum.h"

namespace kvpool {
namespace {

// Both keep the node: memory that somebody looks at stays mapped after the pool is closed. In a
// forked child the locks may be held for ever, so nothing is given back there.
class LocalPins final : public Pins {
 public:
  LocalPins(std::shared_ptr<Node> node, std::vector<Lease> leases)
      : node_(std::move(node)), leases_(std::move(leases)) {
    base = node_->arena();
    base_bytes = node_->arena_bytes();
    places.reserve(leases_.size());
    for (const Lease& lease : leases_) places.push_back({lease.offset, lease.bytes});
  }
  ~LocalPins() override {
    if (!node_->is_forked()) node_->release(leases_);
  }

 private:
  std::shared_ptr<Node> node_;
  std::vector<Lease> leases_;
};

class LocalRoom final : public Room {
 public:
  LocalRoom(std::shared_ptr<Node> node, const Ticket& ticket, std::uint32_t block_bytes)
      : node_(std::move(node)), ticket_(ticket), bytes_(block_bytes) {
    memory = node_->slot(ticket_);
  }
  ~LocalRoom() override {
    if (open_ && !node_->is_forked()) node_->abort(ticket_);
  }
  PutStatus commit(Deadline deadline) override {
    open_ = false;
    return node_->commit(ticket_, checksum(memory, bytes_), deadline);
  }

 private:
  std::shared_ptr<Node> node_;
  Ticket ticket_;
  std::uint32_t bytes_;
  bool open_ = true;
};

}  // namespace

std::size_t LocalChannel::lookup(const Space& space, std::span<const Hash128> keys,
                                 std::uint8_t* tiers, Miss& why) {
  return node_->lookup(*space.local, keys, tiers, {}, &why);
}

std::size_t LocalChannel::get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                              Miss& why) {
  return node_->get(*space.local, keys, sink, &why);
}

void LocalChannel::put(const PutCall& call, BlockSource& source, PutStatus* statuses) {
  node_->put({*call.space.local, call.keys, call.parent, call.deadline}, source, statuses);
}

std::unique_ptr<Pins> LocalChannel::acquire(const Space& space, std::span<const Hash128> keys,
                                            Miss& why) {
  std::vector<Lease> leases(keys.size());
  leases.resize(node_->acquire(*space.local, keys, leases.data(), &why));
  return std::make_unique<LocalPins>(node_, std::move(leases));
}

std::unique_ptr<Room> LocalChannel::reserve(const PutCall& call, PutStatus& status) {
  Ticket ticket;
  status = node_->reserve({*call.space.local, call.keys, call.parent, call.deadline}, ticket);
  if (status != PutStatus::stored) return nullptr;
  return std::make_unique<LocalRoom>(node_, ticket, call.space.block_bytes);
}

std::size_t LocalChannel::remove(const Space& space, std::span<const Hash128> keys) {
  return node_->remove(*space.local, keys);
}

std::size_t LocalChannel::wait(const Space& space, std::span<const Hash128> keys,
                               Deadline deadline) {
  return node_->wait(*space.local, keys, deadline, {});
}

}  // namespace kvpool
