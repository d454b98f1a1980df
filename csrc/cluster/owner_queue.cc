#include "cluster/owner_queue.h"

#include <algorithm>

namespace kvpool {

bool OwnerQueue::push(const DirectoryKey& key, bool came, Time now) {
  if (waiting_.size() >= keys_max_) return false;
  if (waiting_.empty()) since_ = now;
  waiting_.push_back({key, came});
  return true;
}

OwnerQueue::Keys OwnerQueue::take_batch(Time now) {
  const std::size_t count = std::min(waiting_.size(), kKeysPerBatch);
  std::vector<Item> items(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  since_ = now;
  // Stable: the last of those of one key is what became of it.
  std::ranges::stable_sort(items, {}, &Item::key);
  Keys keys;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i + 1 < items.size() && items[i + 1].key == items[i].key) continue;
    (items[i].came ? keys.came : keys.went).push_back(items[i].key);
  }
  return keys;
}

}  // namespace kvpool
