#include "node_threads.h"

#include <pthread.h>

#include <new>

namespace mlxmem {

namespace {

std::atomic<NodeThread*> first{nullptr};
pthread_key_t at_exit;
bool notices_exit = false;

void give_back(void* thread) {
  // Another destructor may drop arrays after this one: it takes one again.
  node_threads::current = nullptr;
  static_cast<NodeThread*>(thread)->taken.store(
      false, std::memory_order_release);
}

NodeThread* take_left() {
  for (auto thread = node_threads::all(); thread; thread = thread->next) {
    if (!thread->taken.load(std::memory_order_relaxed) &&
        !thread->taken.exchange(true, std::memory_order_acquire)) {
      return thread;
    }
  }
  return nullptr;
}

NodeThread* make() {
  auto thread = new (std::nothrow) NodeThread;
  if (thread) {
    thread->next = first.load(std::memory_order_relaxed);
    while (!first.compare_exchange_weak(
        thread->next,
        thread,
        std::memory_order_release,
        std::memory_order_relaxed)) {
    }
  }
  return thread;
}

} // namespace

void NodeThread::start(uint32_t new_epoch, uint64_t new_free_tag) {
  totals.store(0, std::memory_order_relaxed);
  head = length = spare = 0;
  free_tag = new_free_tag;
  epoch.store(new_epoch, std::memory_order_release); // now they count
}

void node_threads::prepare() {
  // Without a key, a thread that exits leaves its own behind.
  if (!notices_exit) {
    notices_exit = pthread_key_create(&at_exit, give_back) == 0;
  }
}

NodeThread* node_threads::take() {
  auto thread = take_left();
  if (!thread) {
    thread = make();
  }
  if (thread && notices_exit) {
    pthread_setspecific(at_exit, thread);
  }
  current = thread;
  return thread;
}

NodeThread* node_threads::all() {
  return first.load(std::memory_order_acquire);
}

void node_threads::forget_others() {
  for (auto thread = all(); thread; thread = thread->next) {
    if (thread != current) {
      thread->start(0, 0);
      thread->taken.store(false, std::memory_order_relaxed);
    }
  }
}

} // namespace mlxmem
