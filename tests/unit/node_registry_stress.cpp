// Drives the registry of array nodes as MLX does, without MLX: blocks of memory
// stand for the nodes. Exits with 0 when all holds.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "node_registry.h"

using namespace mlxmem;

namespace {

struct alignas(16) Node {
  char bytes[abi::kDescSize];
};

NodeRegistry registries[2];
std::atomic<NodeRegistry*> current{nullptr};
uint32_t sessions = 0;

NodeRegistry& start() {
  auto& registry = registries[++sessions % 2];
  registry.clear(sessions);
  current.store(&registry);
  return registry;
}

void check(bool holds, const char* what, uint64_t value = 0) {
  if (!holds) {
    std::fprintf(stderr, "%s (%lu)\n", what, static_cast<unsigned long>(value));
    std::_Exit(1);
  }
}

void check_counts(
    const NodeRegistry& registry,
    uint64_t live,
    uint64_t pending) {
  auto counts = registry.counts();
  check(counts.live == live, "live", counts.live);
  check(counts.pending == pending, "pending", counts.pending);
  check(registry.slots().size() == live, "slots", registry.slots().size());
  check(registry.is_complete(), "nodes without a slot");
}

Node* make(NodeRegistry& registry, bool pending) {
  auto node = new Node;
  registry.created(node, pending);
  return node;
}

void drop(NodeRegistry& registry, Node* node) {
  check(registry.destroyed(node), "a node is not known");
  delete node;
}

uint64_t next_random(uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

size_t thread_blocks() {
  size_t n = 0;
  for (auto thread = node_threads::all(); thread; thread = thread->next) {
    ++n;
  }
  return n;
}

// One thread makes all nodes, another drops them; 10,000,000 in all.
void one_way() {
  constexpr size_t kWindow = 1000;
  auto& registry = start();
  std::vector<std::atomic<Node*>> window(kWindow);
  constexpr size_t kNodes = 10000000;
  std::thread dropping([&] {
    for (size_t i = 0; i < kNodes; ++i) {
      auto& place = window[i % kWindow];
      Node* node;
      while (!(node = place.load(std::memory_order_acquire))) {
        std::this_thread::yield();
      }
      place.store(nullptr, std::memory_order_release);
      if (i % 2) {
        registry.evaluated(node);
      }
      drop(registry, node);
    }
  });
  for (size_t i = 0; i < kNodes; ++i) {
    auto& place = window[i % kWindow];
    auto node = make(registry, i % 3);
    while (place.load(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
    place.store(node, std::memory_order_release);
  }
  dropping.join();
  check_counts(registry, 0, 0);
  // Those that live at once, and two magazines for each of the threads.
  check(
      registry.used() <= kWindow + 1 + 4 * 1024 + 64, "used", registry.used());
}

// Threads that make nodes, and drop each other's.
void all_ways() {
  constexpr size_t kPlaces = 20000;
  constexpr int kThreads = 4;
  auto& registry = start();
  std::vector<std::atomic<Node*>> places(kPlaces);
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      uint64_t state = 88172645463325252ull + i;
      for (int n = 0; n < 500000; ++n) {
        auto number = next_random(&state);
        auto node = number % 2 ? make(registry, number % 4 == 1) : nullptr;
        node = places[number / 8 % kPlaces].exchange(node);
        if (node) {
          if (number % 8 < 4) {
            registry.evaluated(node);
          }
          drop(registry, node);
        }
      }
      --running;
    });
  }
  while (running) {
    auto counts = registry.counts();
    check(counts.live <= kPlaces + kThreads, "live", counts.live);
    check(registry.slots().size() <= kPlaces + kThreads, "slots");
  }
  for (auto& thread : threads) {
    thread.join();
  }
  uint64_t live = 0;
  for (auto& place : places) {
    live += place.load() != nullptr;
  }
  check(registry.counts().live == live, "live", registry.counts().live);
  check(registry.slots().size() == live, "slots", registry.slots().size());
  for (auto& place : places) {
    if (place) {
      registry.evaluated(place);
    }
  }
  check_counts(registry, live, 0);
  for (auto& place : places) {
    if (place) {
      drop(registry, place);
    }
  }
  check_counts(registry, 0, 0);
  check(
      registry.used() <= kPlaces + kThreads + (kThreads + 1) * 2 * 1024 + 64,
      "used",
      registry.used());
}

// Threads that come and go leave what they kept to the next ones.
void short_threads() {
  auto& registry = start();
  size_t blocks = 0;
  std::vector<Node*> nodes;
  for (int i = 0; i < 2000; ++i) {
    std::thread([&] {
      for (int n = 0; n < 10; ++n) {
        nodes.push_back(make(registry, n < 3));
      }
    }).join();
    if (i == 0) {
      blocks = thread_blocks();
    }
  }
  check(thread_blocks() == blocks, "blocks", thread_blocks());
  check_counts(registry, 20000, 6000);
  check(registry.used() < 20000 + 2 * 64, "used", registry.used());
  std::thread([&] {
    for (auto node : nodes) {
      drop(registry, node);
    }
  }).join();
  check_counts(registry, 0, 0);
}

// Sessions begin while threads work, some of which are late by several.
void late_threads() {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  start();
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      uint64_t state = 521288629ull + i;
      std::vector<Node*> held;
      while (!stop) {
        auto registry = current.load();
        auto number = next_random(&state);
        if (number % 1024 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        if (number % 2 && held.size() < 5000) {
          held.push_back(make(*registry, number & 8));
        } else if (!held.empty()) {
          std::swap(held[number / 16 % held.size()], held.back());
          registry->evaluated(held.back());
          registry->destroyed(held.back()); // or of an older session
          delete held.back();
          held.pop_back();
        }
      }
      for (auto node : held) {
        current.load()->destroyed(node);
        delete node;
      }
    });
  }
  for (int i = 0; i < 3000; ++i) {
    auto& registry = start();
    check(registry.counts().live < 25000, "live", registry.counts().live);
    std::this_thread::sleep_for(std::chrono::microseconds(i % 300));
    registry.slots();
  }
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
  one_way(); // exact again
}

// A child of fork() begins anew, whatever the other threads were doing.
void forks() {
  std::atomic<bool> stop{false};
  start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      std::vector<Node*> held;
      while (!stop) {
        for (int n = 0; n < 3000; ++n) {
          held.push_back(make(*current.load(), true));
        }
        for (auto node : held) {
          drop(*current.load(), node);
        }
        held.clear();
      }
    });
  }
  auto old = make(*current.load(), true);
  for (int i = 0; i < 100; ++i) {
    pid_t child = fork();
    if (child == 0) {
      alarm(60);
      current.load()->close();
      node_threads::forget_others();
      check(!current.load()->destroyed(old), "a node is known after the fork");
      check(current.load()->counts().live == 0, "live after the fork");
      auto& registry = start();
      static Node nodes[3000];
      for (auto& node : nodes) {
        registry.created(&node, true);
      }
      check_counts(registry, 3000, 3000);
      for (auto& node : nodes) {
        check(registry.destroyed(&node), "a node is not known");
      }
      check_counts(registry, 0, 0);
      std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(status == 0, "the child's status", status);
  }
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
  check_counts(*current.load(), 1, 1);
  drop(*current.load(), old);
}

} // namespace

int main(int argc, char** argv) {
  const struct {
    const char* name;
    void (*run)();
  } all[] = {
      {"one-way", one_way},
      {"all-ways", all_ways},
      {"short-threads", short_threads},
      {"late-threads", late_threads},
      {"forks", forks}};
  for (auto& one : all) {
    if (argc == 2 && std::strcmp(argv[1], one.name) == 0) {
      one.run();
      return 0;
    }
  }
  return 2;
}
