#include "image_check.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <vector>

#include "base/check.h"
#include "disk.h"

namespace kvpool::test {
namespace {

constexpr unsigned kChild_s = 60;  // an image takes some milliseconds

struct FreeBytes {
  void operator()(std::byte* at) const { std::free(at); }
};
using Pages = std::unique_ptr<std::byte, FreeBytes>;

Pages pages_for(std::uint64_t bytes) {
  Pages pages(static_cast<std::byte*>(std::aligned_alloc(kSlotAlignBytes, bytes)));
  KVP_CHECK(pages != nullptr);
  return pages;
}

IndexState state_of(const Ssd& ssd, Verdict& verdict) {
  IndexState state;
  for (const SsdSpace& space : ssd.spaces())
    state.spaces[space.number] = {space.id, space.block_bytes};
  for (const SsdClass& each : ssd.classes()) state.classes[each.slot_bytes] = each.slab_units;
  state.next_space = ssd.facts().next_space;
  state.tau_s = ssd.facts().tau_s;
  const auto visited = ssd.for_each_entry(
      [&](const BlockKey& key, const BlockEntry& entry) { state.entries[bytes_of(key)] = entry; });
  if (!visited) state.entries.clear();
  state.hidden = ssd.forgotten().size();
  verdict.entries = state.entries.size();
  return state;
}

void check_extents(const IndexState& state, Verdict& verdict) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  for (const auto& [key, entry] : state.entries) {
    const SsdPlace place{entry.slab_unit, entry.slot, entry.bytes};
    extents.emplace_back(place.offset(), place.offset() + place.slot_bytes());
  }
  std::ranges::sort(extents);
  for (std::size_t i = 1; i < extents.size(); ++i)
    verdict.doubled += extents[i].first < extents[i - 1].second;
}

void check_chains(const IndexState& state, Verdict& verdict) {
  for (const auto& [key, entry] : state.entries) {
    if (entry.parent == Hash128{}) continue;
    KeyBytes parent = key;
    entry.parent.to_bytes(parent.data() + offsetof(BlockKey, hash));
    verdict.orphans += !state.entries.contains(parent);
  }
}

bool is_what_was_put(const BlockKey& key, const BlockEntry& entry, const std::byte* read) {
  const KnownPayload* known = Expected::instance().payload_of(entry.sum);
  if (known == nullptr || known->hash != key.hash128() || known->bytes != entry.bytes) return false;
  std::vector<std::byte> put(entry.bytes);
  fill_payload(known->seed, put);
  return std::memcmp(put.data(), read, put.size()) == 0;
}

void check_payloads(Ssd& ssd, const IndexState& state, Verdict& verdict) {
  const auto reads = std::make_shared<SsdReads>(state.entries.size());
  std::vector<Pages> into;
  for (const auto& [key, entry] : state.entries) {
    SsdReads::Item& item = reads->items[into.size()];
    item.place = {entry.slab_unit, entry.slot, entry.bytes};
    item.sum = entry.sum;
    into.push_back(pages_for(item.place.slot_bytes()));
    item.into = into.back().get();
  }
  ssd.read(reads);
  while (!reads->wait(std::chrono::steady_clock::now() + std::chrono::seconds(kChild_s))) {
  }
  std::size_t i = 0;
  for (const auto& [key, entry] : state.entries) {
    const ReadOutcome outcome = reads->items[i].outcome.load();
    BlockKey block;
    std::memcpy(&block, key.data(), sizeof block);
    verdict.damaged += outcome == ReadOutcome::damaged;
    verdict.failed += outcome == ReadOutcome::failed;
    verdict.wrong += outcome == ReadOutcome::whole && !is_what_was_put(block, entry, into[i].get());
    ++i;
  }
}

void look_at(const std::string& directory, Durability durability, bool chains, Verdict& verdict) {
  SsdOptions options;
  options.path = directory;
  options.durability = durability;
  options.io_threads = 1;
  options.direct = false;  // the same bytes, and a run does not wait for a disk
  auto opened = Ssd::open(options);
  if (!opened) {
    const std::string& why = opened.error().message;
    std::memcpy(verdict.why, why.data(), std::min(why.size(), sizeof verdict.why - 1));
    verdict.end = Verdict::End::refused;
    return;
  }
  const IndexState state = state_of(**opened, verdict);
  const auto lost = Expected::instance().commits_lost(state);
  verdict.is_a_state = lost.has_value();
  verdict.commits_lost = lost.value_or(0);
  verdict.is_promise_kept = Expected::instance().is_promised(verdict.commits_lost);
  check_extents(state, verdict);
  if (chains) check_chains(state, verdict);
  check_payloads(**opened, state, verdict);
  verdict.end = Verdict::End::complete;
}

Verdict::End end_of(pid_t child, const Verdict& verdict) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0) KVP_CHECK(errno == EINTR);
  if (WIFSIGNALED(status))
    return WTERMSIG(status) == SIGALRM ? Verdict::End::hung : Verdict::End::crashed;
  return verdict.end;
}

}  // namespace

Verdict check_image(const std::string& directory, Durability durability, bool chains) {
  void* const shared =
      mmap(nullptr, sizeof(Verdict), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  KVP_CHECK(shared != MAP_FAILED);
  auto* const verdict = new (shared) Verdict;
  // The child has nobody who would unlock it, so it must not be another thread's at the fork.
  const auto held = Expected::instance().hold();
  const pid_t child = fork();
  KVP_CHECK(child >= 0);
  if (child == 0) {
    Disk::instance().let_go();
    alarm(kChild_s);
    look_at(directory, durability, chains, *verdict);
    _exit(0);
  }
  const Verdict::End end = end_of(child, *verdict);
  verdict->end = end;
  const Verdict answer = *verdict;
  munmap(shared, sizeof(Verdict));
  return answer;
}

}  // namespace kvpool::test
