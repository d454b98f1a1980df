#include "net/ucx_memory.h"

#include <algorithm>

#include "net/ucx_address.h"

namespace kvpool {

Result<std::unique_ptr<UcxMemory>> UcxMemory::create(const UcxContext& context,
                                                     const Arena& arena) {
  if (!arena.is_sealed())
    return fail(Code::bad_argument,
                "UCX needs an arena that is sealed: memory that a peer may read must stay");
  std::unique_ptr<UcxMemory> memory(new UcxMemory(context));
  const std::uint64_t chunk = ucx_chunk_bytes(arena.bytes());
  for (std::uint64_t at = 0; at < arena.bytes(); at += chunk) {
    auto added = memory->add(arena.base() + at, std::min(chunk, arena.bytes() - at));
    if (!added) return std::unexpected(added.error());
  }
  return memory;
}

Result<void> UcxMemory::add(std::byte* begin, std::uint64_t bytes) {
  const UcxLibrary& library = context_.library();
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_PROT | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = begin;
  params.length = bytes;
  params.prot =
      UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_READ;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  ucp_mem_h chunk = nullptr;
  ucs_status_t status = library.ucp_mem_map(context_.handle(), &params, &chunk);
  if (status != UCS_OK)
    return library.failure(status, "registering " + std::to_string(bytes) + " bytes of the arena");
  chunks_.push_back(chunk);
  void* key = nullptr;
  std::size_t key_bytes = 0;
  status = library.ucp_rkey_pack(context_.handle(), chunk, &key, &key_bytes);
  if (status != UCS_OK) return library.failure(status, "making a remote key");
  const auto* const first = static_cast<const std::byte*>(key);
  keys_.emplace_back(first, first + key_bytes);
  library.ucp_rkey_buffer_release(key);
  if (key_bytes == 0 || key_bytes > kUcxRemoteKeyMax)
    return fail(Code::refused, "UCX: a remote key of " + std::to_string(key_bytes) +
                                   " bytes; at most " + std::to_string(kUcxRemoteKeyMax) +
                                   ": name fewer devices");
  return {};
}

UcxMemory::~UcxMemory() {
  if (context_.is_child()) return;
  for (ucp_mem_h chunk : chunks_) context_.library().ucp_mem_unmap(context_.handle(), chunk);
}

}  // namespace kvpool
