#include "node_load.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "block/checksum.h"
#include "expected.h"

namespace kvpool::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kBlockBytes[] = {10'000, 37'000};
constexpr std::size_t kSpaces = 3, kChains = 12, kChainMax = 24;
constexpr std::uint64_t kDramBytes = 4 << 20;  // less than the tier: blocks go and come back

Node::Deadline never_hung() { return std::chrono::steady_clock::now() + 120s; }

std::uint64_t seed_of(const Hash128& key) { return mix64(key.low + 3 * key.high); }

class Source final : public BlockSource {
 public:
  Source(std::span<const Hash128> keys, std::uint32_t bytes) : keys_(keys), bytes_(bytes) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    fill_payload(seed_of(keys_[index]), {slot, bytes_});
    sum = checksum(slot, bytes_);
    Expected::instance().note_payload(sum, {keys_[index], seed_of(keys_[index]), bytes_});
    return true;
  }

 private:
  std::span<const Hash128> keys_;
  std::uint32_t bytes_;
};

class Sink final : public BlockSink {
 public:
  Sink(std::span<const Hash128> keys, std::uint32_t bytes)
      : keys_(keys), wanted_(bytes), got_(bytes) {}
  bool deliver(std::size_t index, const IndexReader& reader, const Found& found) override {
    if (found.bytes != got_.size() || !reader.copy(found, got_.data())) return false;
    return deliver_whole(index, got_);
  }
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override {
    fill_payload(seed_of(keys_[index]), wanted_);
    wrong += !std::ranges::equal(payload, wanted_);
    return true;
  }
  std::uint64_t wrong = 0;

 private:
  std::span<const Hash128> keys_;
  std::vector<std::byte> wanted_, got_;
};

}  // namespace

NodeLoad::NodeLoad(const SsdOptions& options, PolicyKind policy, std::uint64_t seed)
    : options_(options), policy_(policy), dice_(seed), spaces_(kSpaces), chains_(kChains) {
  for (Space& space : spaces_) space.id = next_space_++;
  for (std::size_t i = 0; i < kChains; ++i) chains_[i].space = i % kSpaces;
  clock_->set(1000);
  open();
}

NodeLoad::~NodeLoad() { close(); }

void NodeLoad::open() {
  NodeOptions options;
  options.store.bytes_limit = kDramBytes;
  options.store.bytes_max = kDramBytes;
  options.store.salt = 17;
  options.store.policy = policy_;
  options.prefault = Prefault::off;
  options.huge_pages = false;
  options.has_ssd = true;
  options.ssd = options_;
  options.ssd_admit = SsdAdmit::all;
  options.ssd_timeout = 60s;
  auto opened = Node::open(options, clock_);
  if (!opened) std::fprintf(stderr, "%s\n", opened.error().message.c_str());
  KVP_CHECK(opened.has_value());
  node_ = std::move(*opened);
  if (options_.durability != Durability::relaxed) Expected::instance().promise_newest();
  for (Space& space : spaces_) name_space(space, space.id);
}

void NodeLoad::close() {
  if (!node_) return;
  moves_ += node_->stats().store.ssd_moved;
  node_->check_invariants();
  node_->close(dice_.chance(0.5) ? never_hung() : Node::Deadline{});
  node_.reset();
}

void NodeLoad::reopen() {
  close();
  open();
}

void NodeLoad::name_space(Space& space, std::uint64_t id) {
  space.id = id;
  const auto index = static_cast<std::size_t>(&space - spaces_.data());
  auto opened = node_->open_namespace({mix64(id), id}, kBlockBytes[index % 2]);
  KVP_CHECK(opened.has_value());
  space.at = *opened;
}

void NodeLoad::step() {
  clock_->set(clock_->now() + 0.001 * static_cast<double>(dice_.below(2000)));
  const std::uint64_t which = dice_.below(100);
  if (which < 60)
    put();
  else if (which < 80)
    get();
  else if (which < 86)
    remove();
  else if (which < 88)
    KVP_CHECK(node_->flush(never_hung()));
  else if (which < 90)
    drop();
  else
    resize();  // often: a shrink is what moves blocks, where its unit holds any
}

void NodeLoad::put() {
  Chain& chain = any_chain();
  if (chain.keys.size() >= kChainMax) chain.keys.clear();
  std::vector<Hash128> keys(dice_.between(1, 8));
  for (Hash128& key : keys) key = {mix64(next_key_), next_key_}, ++next_key_;
  // Behind one that may be gone by now; then it hangs on nothing.
  const Hash128* parent = chain.keys.empty() ? nullptr : &chain.keys.back();
  Namespace& space = *spaces_[chain.space].at;
  Source source(keys, space.block_bytes);
  std::vector<PutStatus> statuses(keys.size());
  node_->put({space, keys, parent, never_hung()}, source, statuses.data());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const bool is_kept = statuses[i] == PutStatus::stored || statuses[i] == PutStatus::present;
    puts_ += is_kept;
    if (is_kept && options_.durability == Durability::durable)
      not_kept_ += !Expected::instance().was_committed(keys[i]);
    if (is_kept) chain.keys.push_back(keys[i]);
  }
}

void NodeLoad::get() {
  const Chain& chain = any_chain();
  const Namespace& space = *spaces_[chain.space].at;
  // From anywhere in the chain, for a block on the SSD is read one by one.
  const std::size_t from = dice_.below(chain.keys.size() + 1);
  const std::span<const Hash128> keys = std::span(chain.keys).subspan(from);
  Sink sink(keys, space.block_bytes);
  hits_ += node_->get(space, keys, sink);
  wrong_ += sink.wrong;
}

void NodeLoad::remove() {
  Chain& chain = any_chain();
  if (chain.keys.empty()) return;
  const std::size_t from = dice_.below(chain.keys.size());
  node_->remove(*spaces_[chain.space].at, std::span(chain.keys).subspan(from));
  chain.keys.resize(from);
}

void NodeLoad::drop() {
  const std::size_t index = dice_.below(spaces_.size());
  KVP_CHECK(node_->drop_namespace(*spaces_[index].at, never_hung()).has_value());
  for (Chain& chain : chains_)
    if (chain.space == index) chain.keys.clear();
  name_space(spaces_[index], next_space_++);
}

// Two units less, one less, or back to all of it. One would not do: where the last slab is the only
// one of its size there is nowhere to move its blocks, and it stays the only one for the whole run.
void NodeLoad::resize() {
  const std::uint64_t all = options_.capacity_bytes;
  const bool is_small = node_->stats().ssd_facts.capacity_bytes < all;
  const std::uint64_t less = dice_.between(1, 2) * kUnitBytes;
  KVP_CHECK(node_->resize_ssd(is_small ? all : all - less, never_hung()).has_value());
}

}  // namespace kvpool::test
