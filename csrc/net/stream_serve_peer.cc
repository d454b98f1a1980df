// What only other nodes ask: numbers of namespaces, and this node's part of the directory.
#include <algorithm>
#include <cstring>

#include "net/stream_serve.h"

namespace kvpool {
namespace {

Refusal refusal_for(Told told) {
  switch (told) {
    case Told::ok:
      break;
    case Told::gap:
      return Refusal::gap;
    case Told::stale:
      return Refusal::stale;
    case Told::full:
      return Refusal::full;
  }
  return Refusal::none;
}

template <typename T>
void append(std::vector<std::byte>& body, std::span<const T> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  const std::size_t at = body.size();
  body.resize(at + bytes.size());
  if (!bytes.empty()) std::memcpy(body.data() + at, bytes.data(), bytes.size());
}

}  // namespace

bool StreamServe::serve_peer(const Call& call) {
  if (call.head.op == Op::find_space) return find_spaces(call);
  // Held for the call: whoever takes it away does not wait for us.
  const std::shared_ptr<DirectoryService> directory = host_.directory.get();
  if (!directory) return answer(call, {.refusal = Refusal::not_here});
  if (call.head.op == Op::pull) return pull(call, *directory);
  return call.head.op == Op::locate ? locate(call, *directory) : tell(call, *directory);
}

bool StreamServe::pull(const Call& call, DirectoryService& directory) {
  const PullAnswer pulled =
      directory.pull(call.pull, call.keys, (call.head.flags & kLastCopies) != 0);
  return answer(call, {.count = std::min<std::size_t>(pulled.here, call.keys.size()),
                       .body = std::as_bytes(std::span(&pulled, 1)),
                       .load = directory.load()});
}

bool StreamServe::find_spaces(const Call& call) {
  std::vector<FoundSpace> places(call.keys.size());
  std::size_t found = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Namespace* space = host_.node.find_namespace(call.keys[i]);
    if (space == nullptr) continue;
    places[i] = {space->number, space->block_bytes};
    ++found;
  }
  return answer(call, {.count = found, .body = std::as_bytes(std::span(places))});
}

bool StreamServe::tell(const Call& call, DirectoryService& directory) {
  // Who has proved to be one member does not speak for another.
  if (HolderName{call.from.node, call.from.incarnation} != host_.peer)
    return garbage("an announcement in the name of another member, or life, than its own");
  const bool is_fresh = (call.head.flags & kFresh) != 0;
  const Told told = call.head.op == Op::publish ? directory.publish(call.from, call.keys, is_fresh)
                                                : directory.withdraw(call.from, call.keys);
  return answer(call, {.count = told == Told::ok ? call.keys.size() : 0,
                       .refusal = refusal_for(told),
                       .load = directory.load()});
}

bool StreamServe::locate(const Call& call, DirectoryService& directory) {
  Located located;
  directory.locate(call.keys, located);
  std::size_t found = 0;
  for (const auto& holders : located.holders) found += holders[0] != kNoHolder;
  const LocatedHead head{.names = static_cast<std::uint16_t>(located.names.size())};
  std::vector<std::byte> body;
  body.reserve(sizeof head + located.names.size() * sizeof(HolderName) +
               located.holders.size() * sizeof(located.holders[0]));
  append(body, std::span(&head, 1));
  append(body, std::span<const HolderName>(located.names));
  append(body, std::span<const std::array<std::uint16_t, kHoldersPerKey>>(located.holders));
  return answer(call, {.count = found, .body = body, .load = directory.load()});
}

}  // namespace kvpool
