#include "threads.h"

#if defined(__APPLE__)
#include <pthread.h>
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mlxmem {

namespace {

uint64_t system_id() {
#if defined(__APPLE__)
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return id;
#else
  return syscall(SYS_gettid);
#endif
}

} // namespace

uint32_t threads::ask_current_id() {
  current_id = static_cast<uint32_t>(system_id());
  return current_id;
}

void forget_current_thread_id() {
  threads::current_id = 0;
}

} // namespace mlxmem
