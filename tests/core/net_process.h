// Client processes: each has what it attaches with and nothing of the others, is told to go on and
// tells how far it is, a byte at a time.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include "core_process.h"
#include "net_shm.h"

namespace kvpool::test {

// The child must not use doctest: what it found it says by its exit status (0 = as it should be).
class ClientProcess {
 public:
  struct Link {  // the child's ends
    int from_parent, to_parent;
    void say(char what) const { KVP_CHECK(write(to_parent, &what, 1) == 1); }
    char hear() const {
      char what = 0;
      return read(from_parent, &what, 1) == 1 ? what : '\0';
    }
  };

  template <typename Body>
  ClientProcess(ShmTicket ticket, Body body) {
    int down[2], up[2];
    KVP_CHECK(pipe2(down, O_CLOEXEC) == 0);
    KVP_CHECK(pipe2(up, O_CLOEXEC) == 0);
    id_ = fork();
    REQUIRE(id_ >= 0);
    if (id_ == 0) {
      close(down[1]);
      close(up[0]);
      auto client = ticket.attach();
      if (!client) _exit(99);
      ShmChannel channel(nullptr);
      channel.attach(*client);
      _exit(body(channel, **client, Link{down[0], up[1]}));
    }
    ticket.close_all();
    close(down[0]);
    close(up[1]);
    to_ = down[1];
    from_ = up[0];
  }
  ~ClientProcess() {
    if (id_ > 0) kill();
    close(to_);
    close(from_);
  }
  ClientProcess(const ClientProcess&) = delete;
  ClientProcess& operator=(const ClientProcess&) = delete;

  void say(char what) const { REQUIRE(write(to_, &what, 1) == 1); }
  char hear() const {
    char what = 0;
    return read(from_, &what, 1) == 1 ? what : '\0';
  }
  void signal(int number) const { send_signal(id_, number); }
  void kill() {
    ::kill(id_, SIGKILL);
    (void)join();
  }
  // Exit status; -signal if a signal ended it.
  int join() {
    int status = 0;
    while (waitpid(id_, &status, 0) < 0) REQUIRE(errno == EINTR);
    id_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t id_ = 0;
  int to_ = -1, from_ = -1;
};

}  // namespace kvpool::test
