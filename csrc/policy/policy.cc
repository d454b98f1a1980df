#include "policy/policy.h"

#include <array>

#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

struct Entry {
  PolicyKind kind;
  std::string_view name;
  std::unique_ptr<Policy> (*make)(const PolicyOptions&);
};

constexpr std::array kPolicies{
    Entry{PolicyKind::temperature, "temperature", make_temperature},
    Entry{PolicyKind::lru, "lru", make_lru},
    Entry{PolicyKind::lfu, "lfu", make_lfu},
    Entry{PolicyKind::fifo, "fifo", make_fifo},
    Entry{PolicyKind::s3fifo, "s3fifo", make_s3fifo},
};

const Entry& entry(PolicyKind kind) { return kPolicies[static_cast<std::size_t>(kind)]; }

}  // namespace

std::optional<PolicyKind> policy_kind(std::string_view name) {
  for (const Entry& policy : kPolicies) {
    if (policy.name == name) return policy.kind;
  }
  return std::nullopt;
}

std::string_view policy_name(PolicyKind kind) { return entry(kind).name; }

std::unique_ptr<Policy> make_policy(PolicyKind kind, const PolicyOptions& options) {
  return entry(kind).make(options);
}

}  // namespace kvpool
