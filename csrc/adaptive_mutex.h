// A mutex that spins for a moment before it sleeps: what the books' lock guards
// takes less time than going to sleep and being woken.

#pragma once

#include <pthread.h>

namespace mlxmem {

class AdaptiveMutex {
 public:
  AdaptiveMutex() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
#if defined(__GLIBC__)
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
    pthread_mutex_init(&mutex_, &attributes);
    pthread_mutexattr_destroy(&attributes);
  }
  ~AdaptiveMutex() {
    pthread_mutex_destroy(&mutex_);
  }
  AdaptiveMutex(const AdaptiveMutex&) = delete;
  AdaptiveMutex& operator=(const AdaptiveMutex&) = delete;

  void lock() {
    pthread_mutex_lock(&mutex_);
  }
  bool try_lock() {
    return pthread_mutex_trylock(&mutex_) == 0;
  }
  void unlock() {
    pthread_mutex_unlock(&mutex_);
  }

 private:
  pthread_mutex_t mutex_;
};

} // namespace mlxmem
