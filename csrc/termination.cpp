#include "termination.h"

#include <cerrno>
#include <csignal>

#include <semaphore.h>
#include <unistd.h>

namespace {

sem_t terminated;
pid_t owner = 0;

// Only what POSIX allows in a signal handler.
void on_termination(int number) {
  int error = errno;
  if (getpid() != owner || sem_post(&terminated) != 0) {
    signal(number, SIG_DFL);
    raise(number);
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 &&
      action.sa_handler == on_termination;
}

} // namespace

int mlxmem_catch_termination(void) {
  struct sigaction old;
  if (sigaction(SIGTERM, nullptr, &old) != 0 ||
      (old.sa_handler != SIG_DFL && !is_ours(old))) {
    return 0;
  }
  if (sem_init(&terminated, 0, 0) != 0) {
    return 0;
  }
  owner = getpid();
  struct sigaction action = {};
  action.sa_handler = on_termination;
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGTERM, &action, nullptr) == 0;
}

void mlxmem_wait_for_termination(void) {
  while (sem_wait(&terminated) != 0 && errno == EINTR) {
  }
}

void mlxmem_release_termination(void) {
  struct sigaction old;
  if (sigaction(SIGTERM, nullptr, &old) == 0 && is_ours(old)) {
    signal(SIGTERM, SIG_DFL);
  }
}
