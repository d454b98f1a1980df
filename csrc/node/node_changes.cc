// What came and went, and what is here: the lock around changes.h and resident_walk.h.
#include <algorithm>

#include "node/node.h"

namespace kvpool {

Changes* Node::listen(std::size_t changes_max, Hears hears) {
  auto changes =
      std::make_unique<Changes>(changes_max, hears);  // memory is asked for outside the lock
  changes->lose();                                    // what is here now was not noted
  const Lock lock(mutex_);
  Listeners& listeners = store_->listeners();
  if (listeners.is_full()) return nullptr;
  listeners.add(changes.get());
  listening_.push_back(std::move(changes));
  return listening_.back().get();
}

void Node::stop_listening(Changes* listener) {
  std::unique_ptr<Changes> over;
  const Lock lock(mutex_);
  const auto found = std::ranges::find(listening_, listener, &std::unique_ptr<Changes>::get);
  if (found == listening_.end()) return;
  store_->listeners().remove(listener);
  over.swap(*found);
  listening_.erase(found);
}

bool Node::take_changes(Changes* listener, std::vector<Change>& changes) {
  changes.clear();
  const Lock lock(mutex_);
  const auto found = std::ranges::find(listening_, listener, &std::unique_ptr<Changes>::get);
  return found == listening_.end() || listener->take(changes);
}

// Looked for under the lock, behind all changes so far: nobody can make a node deny what it has.
void Node::deny(const Namespace& space, const Hash128& key) {
  const Lock lock(mutex_);
  BlockId record = kNoBlock;
  if (!store_->listeners().is_any() || store_->find(space, key, record)) return;
  store_->listeners().for_each([&](Changes& each) {
    if (each.hears() == Hears::blocks) each.repeat_gone(space, key);
  });
}

bool Node::walk(ResidentWalk& walk, std::vector<Resident>& found) {
  const Lock lock(mutex_);
  return walk.step(*store_, found);
}

}  // namespace kvpool
