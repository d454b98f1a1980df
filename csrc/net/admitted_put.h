// A put as the node serves it to a connection: as a whole, or, when its clients put more bytes per
// second than they may, only as far as its blocks bring no payload.
#pragma once
#include <span>

#include "net/rate_limit.h"
#include "node/node.h"

namespace kvpool {

// `skip`: so many leading blocks bring no payload. `statuses`: one per key. The caller counts the
// outcome (Traffic::count_put) when it is whole: request.is_part.
void put_admitted(Node& node, RateLimit& limit, const Node::PutRequest& request, std::size_t skip,
                  BlockSource& source, std::span<PutStatus> statuses);

}  // namespace kvpool
