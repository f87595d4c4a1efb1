#include "termination.h"

#include <cerrno>
#include <csignal>
#include <initializer_list>

#include <unistd.h>

#include "wakeup.h"

namespace {

mlxmem::Wakeup terminated;
pid_t owner = 0;
volatile sig_atomic_t first = 0; // the signal that came first
volatile sig_atomic_t terminations = 0; // how many SIGTERM

// Only what POSIX allows in a signal handler.
void on_termination(int number) {
  int error = errno;
  bool again = first != 0;
  if (!again) {
    first = number;
  }
  if (number == SIGTERM) {
    terminations = terminations + 1;
  }
  // A closing terminal sends several SIGHUP, and some send both: no impatience.
  bool ends_wait = !again || (number == SIGTERM && terminations == 2);
  bool kills = getpid() != owner || terminations > 2;
  if (kills || (ends_wait && !terminated.wake())) {
    signal(number, SIG_DFL);
    raise(number);
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 &&
      action.sa_handler == on_termination;
}

bool can_catch(int number) {
  struct sigaction old;
  return sigaction(number, nullptr, &old) == 0 &&
      (is_ours(old) ||
       ((old.sa_flags & SA_SIGINFO) == 0 && old.sa_handler == SIG_DFL));
}

} // namespace

int mlxmem_catch_termination(void) {
  if (!can_catch(SIGTERM) && !can_catch(SIGHUP)) {
    return 0;
  }
  if (!terminated.start()) {
    return 0;
  }
  owner = getpid();
  first = terminations = 0;
  struct sigaction action = {};
  action.sa_handler = on_termination;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaddset(&action.sa_mask, SIGTERM);
  sigaddset(&action.sa_mask, SIGHUP);
  int caught = 0;
  for (int number : {SIGTERM, SIGHUP}) {
    if (can_catch(number) && sigaction(number, &action, nullptr) == 0) {
      caught = 1;
    }
  }
  return caught;
}

int mlxmem_wait_for_termination(void) {
  terminated.wait();
  return first;
}

void mlxmem_release_termination(void) {
  for (int number : {SIGTERM, SIGHUP}) {
    struct sigaction old;
    if (sigaction(number, nullptr, &old) == 0 && is_ours(old)) {
      signal(number, SIG_DFL);
    }
  }
}
