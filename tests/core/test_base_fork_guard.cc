// A forked child knows that it is one, at every depth, and its parent stays what it was.
#include "base/fork_guard.h"
#include "core_process.h"
#include "node/node.h"

namespace kvpool {
namespace {

TEST_CASE("fork guard: a child and its child know what they are and the parent is not one") {
  const ForkGuard guard;
  CHECK_FALSE(guard.is_child());
  const int status = test::status_of_child([&] {
    if (!guard.is_child()) return 1;
    const ForkGuard own;  // made in the child, so it belongs to it
    if (own.is_child()) return 2;
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(guard.is_child() && own.is_child() ? 0 : 1);
    int ended = 0;
    return waitpid(grandchild, &ended, 0) == grandchild && ended == 0 ? 0 : 3;
  });
  CHECK(status == 0);
  CHECK_FALSE(guard.is_child());
}

TEST_CASE("fork guard: a node says in a child that it was forked") {
  NodeOptions options;
  options.store.bytes_limit = kUnitBytes;
  const auto node = Node::open(options, std::make_shared<SystemClock>());
  REQUIRE(node.has_value());
  CHECK_FALSE((*node)->is_forked());
  CHECK(test::status_of_child([&] { return (*node)->is_forked() ? 0 : 1; }) == 0);
  CHECK_FALSE((*node)->is_forked());
}

}  // namespace
}  // namespace kvpool
