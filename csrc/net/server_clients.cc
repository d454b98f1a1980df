// What the clients of a server do and hold, for operators. Takes the server's lock for a copy of
// the list alone, and of each client the locks that its own requests take, shortly.
#include <algorithm>

#include "net/server_parts.h"
#include "net/shm_attachment.h"

namespace kvpool {
namespace {

std::uint64_t read(const std::atomic<std::uint64_t>& count) {
  return count.load(std::memory_order_relaxed);
}

ClientStats stats_of(const ClientBooks& books, const ShmAttachment* shm) {
  ClientStats stats{.number = books.id,
                    .requests = read(books.requests),
                    .bytes_in = read(books.bytes_in),
                    .bytes_out = read(books.bytes_out),
                    .leases = books.leases.count(),
                    .leased_bytes = books.leases.bytes(),
                    .has_shm = books.has_shm.load(std::memory_order_relaxed),
                    .reads = {.gets = read(books.gets),
                              .get_blocks = read(books.get_blocks),
                              .get_bytes = read(books.get_bytes),
                              .views = read(books.views),
                              .view_blocks = read(books.view_blocks)}};
  if (shm != nullptr) stats.reads.add(shm->totals());
  return stats;
}

}  // namespace

std::vector<ClientStats> Server::clients() const {
  std::vector<std::pair<std::shared_ptr<ClientBooks>, std::shared_ptr<ShmAttachment>>> all;
  {
    const std::lock_guard lock(impl_->mutex);
    all.reserve(impl_->clients.size());
    for (const auto& [number, client] : impl_->clients)
      all.emplace_back(client.books, client.started.lock());
  }
  std::vector<ClientStats> stats;
  stats.reserve(all.size());
  for (const auto& [books, shm] : all) stats.push_back(stats_of(*books, shm.get()));
  std::ranges::sort(stats, {}, &ClientStats::number);
  return stats;
}

LeaseAges::Counts Server::lease_ages() const {
  std::vector<std::shared_ptr<ClientBooks>> all;
  {
    const std::lock_guard lock(impl_->mutex);
    all.reserve(impl_->clients.size());
    for (const auto& [number, client] : impl_->clients) all.push_back(client.books);
  }
  LeaseAges::Counts counts{};
  for (const auto& books : all) books->leases.add_ages(counts);
  return counts;
}

void Server::set_rates(std::uint64_t put_bytes_per_s, std::uint64_t get_bytes_per_s) {
  impl_->books.puts.set(put_bytes_per_s);
  impl_->books.gets.set(get_bytes_per_s);
}

}  // namespace kvpool
