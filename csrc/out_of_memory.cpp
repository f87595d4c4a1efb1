#include "out_of_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <memory>
#include <new>

namespace mlxmem {

namespace {

constexpr int kPatience = 30; // seconds
constexpr size_t kBallast = 32 << 20; // of address space; never touched
constexpr size_t kStack = 2 << 20; // of the thread that runs the handler

std::atomic<void (*)(const FailedAllocation*)> handle{nullptr};
std::atomic<void* (*)()> current_state{nullptr};
std::atomic<void* (*)()> own_state{nullptr};
std::atomic<void*> ballast{nullptr};
thread_local bool is_telling = false;

void keep_ballast() {
  void* memory = mmap(
      nullptr,
      kBallast,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  void* none = nullptr;
  if (memory != MAP_FAILED && !ballast.compare_exchange_strong(none, memory)) {
    munmap(memory, kBallast);
  }
}

void drop_ballast() {
  void* memory = ballast.exchange(nullptr);
  if (memory) {
    munmap(memory, kBallast);
  }
}

bool has_gil() {
  void* (*current)() = current_state.load();
  void* (*own)() = own_state.load();
  void* state = current ? current() : nullptr;
  return state && state == own();
}

// Shared with a thread that may take longer than this one waits.
struct Request {
  explicit Request(const FailedAllocation& failed) : failure(failed) {
    pthread_mutex_init(&mutex, nullptr);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#if defined(__linux__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~Request() {
    pthread_cond_destroy(&changed);
    pthread_mutex_destroy(&mutex);
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  void finish() {
    pthread_mutex_lock(&mutex);
    done = true;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
  }

  void wait() {
    timespec until;
#if defined(__linux__)
    clock_gettime(CLOCK_MONOTONIC, &until);
#else
    clock_gettime(CLOCK_REALTIME, &until);
#endif
    until.tv_sec += kPatience;
    pthread_mutex_lock(&mutex);
    while (!done && pthread_cond_timedwait(&changed, &mutex, &until) == 0) {
    }
    pthread_mutex_unlock(&mutex);
  }

  FailedAllocation failure;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool done = false;
};

void run_handler(const FailedAllocation& failure) {
  auto function = handle.load();
  if (function) {
    is_telling = true;
    function(&failure);
    is_telling = false;
  }
}

void* run_request(void* argument) {
  std::unique_ptr<std::shared_ptr<Request>> request(
      static_cast<std::shared_ptr<Request>*>(argument));
  run_handler((*request)->failure);
  (*request)->finish();
  return nullptr;
}

void tell_on_new_thread(const FailedAllocation& failure) {
  auto request = std::make_shared<Request>(failure);
  auto shared = std::make_unique<std::shared_ptr<Request>>(request);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStack);
  pthread_t thread;
  if (pthread_create(&thread, &attributes, run_request, shared.get()) == 0) {
    shared.release();
    request->wait();
  }
  pthread_attr_destroy(&attributes);
}

} // namespace

void set_failure_handler(const FailureHandler& handler) {
  current_state.store(handler.current_state);
  own_state.store(handler.own_state);
  handle.store(handler.handle);
  if (handler.handle) {
    keep_ballast();
  } else {
    drop_ballast();
  }
}

void tell_of_failure(const FailedAllocation& failure) {
  if (is_telling || !handle.load()) {
    return;
  }
  drop_ballast();
  if (has_gil()) {
    run_handler(failure);
  } else {
    try {
      tell_on_new_thread(failure);
    } catch (const std::bad_alloc&) {
      // Then nobody hears of it before MLX does.
    }
  }
  if (handle.load()) {
    keep_ballast();
  }
}

} // namespace mlxmem
