#include "threads.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace mlxmem {

namespace {
thread_local uint32_t thread_id = 0;
}

uint32_t current_thread_id() {
  if (!thread_id) {
    thread_id = static_cast<uint32_t>(syscall(SYS_gettid));
  }
  return thread_id;
}

void forget_current_thread_id() {
  thread_id = 0;
}

} // namespace mlxmem
