// What came and went, and what is here: the lock around changes.h and resident_walk.h.
#include "node/node.h"

namespace kvpool {

void Node::listen(std::size_t changes_max) {
  auto changes =
      std::make_unique<Changes>(changes_max);  // its memory is asked for outside the lock
  changes->lose();                             // what is here now was not noted
  const Lock lock(mutex_);
  changes_.swap(changes);
  store_->set_changes(changes_.get());
}

void Node::stop_listening() {
  std::unique_ptr<Changes> over;
  const Lock lock(mutex_);
  store_->set_changes(nullptr);
  changes_.swap(over);
}

bool Node::take_changes(std::vector<Change>& changes) {
  changes.clear();
  const Lock lock(mutex_);
  return changes_ == nullptr || changes_->take(changes);
}

// Looked for under the lock, behind all changes so far: nobody can make a node deny what it has.
void Node::deny(const Namespace& space, const Hash128& key) {
  const Lock lock(mutex_);
  BlockId record = kNoBlock;
  if (changes_ != nullptr && !store_->find(space, key, record)) changes_->repeat_gone(space, key);
}

bool Node::walk(ResidentWalk& walk, std::vector<Resident>& found) {
  const Lock lock(mutex_);
  return walk.step(*store_, found);
}

}  // namespace kvpool
