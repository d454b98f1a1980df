#include "net/admitted_put.h"

#include <algorithm>

namespace kvpool {

void put_admitted(Node& node, RateLimit& limit, const Node::PutRequest& request, std::size_t skip,
                  BlockSource& source, std::span<PutStatus> statuses) {
  const std::size_t count = request.keys.size();
  if (limit.admit((count - skip) * std::uint64_t{request.space.block_bytes})) {
    node.put(request, source, statuses.data());
    return;
  }
  std::ranges::fill(statuses, PutStatus::chain_broken);
  Node::PutRequest there = request;
  there.keys = request.keys.first(skip);
  if (skip > 0) node.put(there, source, statuses.data());
  if (std::ranges::all_of(statuses.first(skip), is_there)) statuses[skip] = PutStatus::limited;
}

}  // namespace kvpool
