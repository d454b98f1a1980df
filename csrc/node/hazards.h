// Who reads which slot in place without having asked: the pages of all attached clients.
//
// Thread rule: the node's lock. A scan costs a cache line per client that reads nothing in place.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "node/client_page.h"

namespace kvpool {

class HazardBoard {
 public:
  void add(const Hazards& hazards) { clients_.push_back(&hazards); }
  void remove(const Hazards& hazards) { std::erase(clients_, &hazards); }

  // Decides, after a full fence, for a slot that no readable record names any more: if it is not
  // named now, it never will be by a reader who goes on to use it.
  bool names(std::uint64_t offset) const {
    return std::any_of(clients_.begin(), clients_.end(),
                       [&](const Hazards* client) { return client->names(offset); });
  }
  bool empty() const { return clients_.empty(); }

 private:
  std::vector<const Hazards*> clients_;
};

}  // namespace kvpool
