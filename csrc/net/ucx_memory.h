// The arena as peers may read it: registered chunk by chunk, with a remote key for each.
//
// A registration pins pages. A hole that is punched under it takes the pages from the arena and
// leaves them to the network card, which would go on reading what no slot is any more: so the arena
// must be a sealed one, which punches nothing. On RDMA devices all of it is present from here on.
// Remote keys let peers read. The devices register for writing as well (UCX asks for all rights,
// whatever it is told), so a peer must be one that is trusted with the arena.
// Thread rule: made and destroyed where no worker of the context runs. The last to go.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/arena.h"
#include "net/ucx_context.h"

namespace kvpool {

class UcxMemory {
 public:
  // Code::bad_argument: the arena is not sealed.
  static Result<std::unique_ptr<UcxMemory>> create(const UcxContext& context, const Arena& arena);
  ~UcxMemory();
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  const std::vector<std::vector<std::byte>>& remote_keys() const { return keys_; }

 private:
  explicit UcxMemory(const UcxContext& context) : context_(context) {}
  Result<void> add(std::byte* begin, std::uint64_t bytes);

  const UcxContext& context_;
  std::vector<ucp_mem_h> chunks_;
  std::vector<std::vector<std::byte>> keys_;
};

}  // namespace kvpool
