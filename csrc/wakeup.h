// Lets a signal handler wake a waiting thread.

#pragma once

#include <cerrno>

#include "platform.h"

#if MLXMEM_MACOS
#include <fcntl.h>
#include <unistd.h>
#else
#include <semaphore.h>
#endif

namespace mlxmem {

// Nothing of it is destroyed: a handler may come at any time.
class Wakeup {
 public:
  // Forgets earlier calls of wake(). Not while another thread waits.
  bool start();
  // In a signal handler; false when it can't be.
  bool wake();
  // Returns once for every wake().
  void wait();

 private:
#if MLXMEM_MACOS
  int ends_[2] = {-1, -1}; // of a pipe: macOS has no unnamed semaphores
#else
  sem_t semaphore_;
#endif
};

#if MLXMEM_MACOS

inline bool Wakeup::start() {
  for (int& end : ends_) {
    if (end >= 0) {
      close(end);
      end = -1;
    }
  }
  if (pipe(ends_) != 0) {
    return false;
  }
  for (int end : ends_) {
    fcntl(end, F_SETFD, FD_CLOEXEC);
  }
  return true;
}

inline bool Wakeup::wake() {
  char byte = 0;
  return write(ends_[1], &byte, 1) == 1;
}

inline void Wakeup::wait() {
  char byte;
  while (read(ends_[0], &byte, 1) < 0 && errno == EINTR) {
  }
}

#else

inline bool Wakeup::start() {
  return sem_init(&semaphore_, 0, 0) == 0;
}

inline bool Wakeup::wake() {
  return sem_post(&semaphore_) == 0;
}

inline void Wakeup::wait() {
  while (sem_wait(&semaphore_) != 0 && errno == EINTR) {
  }
}

#endif

} // namespace mlxmem
