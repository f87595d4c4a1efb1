#include "threads.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace mlxmem {

uint32_t threads::ask_current_id() {
  current_id = static_cast<uint32_t>(syscall(SYS_gettid));
  return current_id;
}

void forget_current_thread_id() {
  threads::current_id = 0;
}

} // namespace mlxmem
