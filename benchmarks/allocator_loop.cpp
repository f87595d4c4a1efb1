// Allocates and frees through MLX's allocator, on threads of its own: nothing
// but what the recorder sees as two events. The pointer is
// mlx::core::allocator's.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

// The head of mlx::core::allocator::Allocator; its Buffer is one pointer. Not
// in an unnamed namespace: the compiler would conclude that nothing derives
// from it.
struct Allocator {
  virtual void* malloc(std::size_t size) = 0;
  virtual void free(void* buffer) = 0;
};

// Seconds from the first to the last of `pairs` allocations with their frees,
// on each of so many threads.
extern "C" double time_allocations(void* pointer, long pairs, int threads) {
  auto* allocator = static_cast<Allocator*>(pointer);
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&] {
      ++ready;
      while (!go) {
        std::this_thread::yield();
      }
      for (long n = 0; n < pairs; ++n) {
        allocator->free(allocator->malloc(400));
      }
    });
  }
  while (ready < threads) {
    std::this_thread::yield();
  }
  const auto begin = std::chrono::steady_clock::now();
  go = true;
  for (auto& worker : workers) {
    worker.join();
  }
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - begin;
  return elapsed.count();
}
