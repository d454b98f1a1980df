// A child process for what cannot be tried in the test's own: limits, other users, crashes.
#pragma once
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"

namespace kvpool::test {

// Exit status of a child that runs `body`; -signal if a signal ended it. The child must not use
// doctest: it says what it found by its status, and leaves without destructors or leak checks.
template <typename Body>
int status_of_child(Body body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(body());
  int status = 0;
  while (waitpid(child, &status, 0) < 0) REQUIRE(errno == EINTR);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// To a child. After SIGSTOP it returns once every thread of it has stopped: they run on for a while
// after kill(), long enough to serve a request.
inline void send_signal(pid_t child, int number) {
  KVP_CHECK(kill(child, number) == 0);
  siginfo_t what{};
  while (number == SIGSTOP &&
         waitid(P_PID, static_cast<id_t>(child), &what, WSTOPPED | WEXITED | WNOWAIT) != 0)
    KVP_CHECK(errno == EINTR);
}

}  // namespace kvpool::test
