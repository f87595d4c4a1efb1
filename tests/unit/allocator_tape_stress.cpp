// The tape of an allocator that is not there: a mutex and some words stand for
// it. Prints "ok", or what is wrong.

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "allocator_tape.h"
#include "clock.h"

using namespace mlxmem;

namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    std::printf("not so: %s\n", what);
    std::exit(1);
  }
}

AllocatorWords words_of(uint64_t active, uint64_t cache) {
  AllocatorWords words;
  words.active = active;
  words.cache = cache;
  return words;
}

// A late thread's entry, at each place of a chunk, while sessions begin anew.
void restarts() {
  AllocatorTape tape;
  uint64_t active = 0;
  tape.start(words_of(active, 0));
  std::vector<TapeNote> late;
  for (int session = 0; session < 1300; ++session) {
    for (int i = 0; i < session % 514; ++i) {
      auto note = tape.look(words_of(active += 8, 0), nullptr);
      require(note.entry, "there is memory");
      note.fill();
    }
    uint64_t read = 0;
    tape.read(tape.end(), false, [&](const TapeEntry&) { ++read; });
    require(read == static_cast<uint64_t>(session % 514), "all was read");
    late.push_back(tape.look(words_of(active += 8, 0), nullptr));
    tape.start(words_of(active, 0)); // with an entry that is not filled in
    for (auto& note : late) {
      require(
          note.entry != late.back().entry || &note == &late.back(),
          "no place is given away that somebody has");
    }
  }
  for (auto& note : late) {
    note.fill(); // must do no harm
  }
  auto note = tape.look(words_of(active += 8, 0), nullptr);
  uint64_t read = 0;
  tape.read(tape.end(), false, [&](const TapeEntry&) { ++read; });
  require(read == 0, "what is not filled in is not read");
  note.fill();
  tape.read(
      tape.end(), false, [&](const TapeEntry& entry) { read += entry.size; });
  require(read == 8, "what is filled in is read");
}

// One that nobody fills in is left out only when it is to be.
void skipping() {
  AllocatorTape tape;
  tape.start(words_of(0, 0));
  uint64_t active = 0;
  auto lost = tape.look(words_of(active += 5, 0), nullptr);
  for (int i = 0; i < 3000; ++i) {
    tape.look(words_of(active += 8, 0), nullptr).fill();
  }
  uint64_t sum = 0;
  auto add = [&](const TapeEntry& entry) { sum += entry.size; };
  tape.read(tape.end(), false, add);
  require(sum == 0, "the first one is waited for");
  tape.read(tape.end(), true, add);
  require(sum == 3000 * 8, "the rest is read");
  lost.fill(); // late, into a chunk that nobody else was given
  for (int i = 0; i < 3000; ++i) {
    tape.look(words_of(active += 8, 0), nullptr).fill();
  }
  tape.read(tape.end(), false, add);
  require(sum == 6000 * 8, "nothing comes twice");
}

// What each hold of the mutex did, told by the words alone.
void actions() {
  AllocatorTape tape;
  int a, b, c;
  tape.start(words_of(100, 50));
  std::vector<std::pair<Did, uint64_t>> found;
  auto read = [&] {
    found.clear();
    tape.read(tape.end(), false, [&](const TapeEntry& entry) {
      found.push_back({entry.did, entry.size});
    });
    return found;
  };
  using All = std::vector<std::pair<Did, uint64_t>>;
  require(!tape.look(words_of(100, 50), nullptr).entry, "nothing was done");
  tape.look(words_of(130, 20), nullptr).fill();
  require(read() == All{{Did::AllocReuse, 30}}, "a reuse");
  tape.look(words_of(140, 20), nullptr).fill();
  require(read() == All{{Did::AllocNew, 10}}, "a new buffer");
  tape.look(words_of(110, 20), &a).fill();
  require(read() == All{{Did::FreeToOS, 30}}, "a free to the system");
  tape.cache_asked(words_of(100, 20), &b).fill();
  require(!tape.look(words_of(100, 30), nullptr).entry, "it has been noted");
  require(read() == All{{Did::FreeToCache, 10}}, "a free to the cache");
  // A reuse of 10 after which the cache gives back 15, before it counts them.
  tape.cache_frees(words_of(110, 20), &c, 15).fill();
  require(!tape.look(words_of(110, 5), nullptr).entry, "it has been noted");
  All trimmed = {{Did::AllocReuse, 10}, {Did::CacheReturn, 15}};
  require(read() == trimmed, "a reuse that trims");
  // 5 are given back for a new buffer, which is counted in another hold.
  tape.cache_frees(words_of(110, 5), &c, 5).fill();
  require(!tape.look(words_of(110, 0), nullptr).entry, "nothing was made yet");
  tape.look(words_of(150, 0), nullptr).fill();
  All made = {{Did::CacheReturn, 5}, {Did::AllocNew, 40}};
  require(read() == made, "a new buffer that had to have room");
  AllocatorWords limits = words_of(150, 0);
  limits.limits = {7, 9};
  tape.look(limits, nullptr);
  All set = {{Did::SetCacheLimit, 7}, {Did::SetMemoryLimit, 9}};
  require(read() == set, "limits");
}

// Threads that allocate and free, one of which reads.
void many_threads() {
  AllocatorTape tape;
  std::mutex mutex; // the allocator's
  uint64_t active = 0, cache = 0;
  std::deque<uint64_t> cached; // sizes
  tape.start(words_of(0, 0));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> made{0};
  auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::deque<uint64_t> mine;
    for (int i = 0; i < 60000; ++i) {
      TapeNote note;
      if (mine.empty() || random() % 2) {
        std::lock_guard<std::mutex> lock(mutex);
        uint64_t size = 16 + random() % 1000;
        if (!cached.empty() && random() % 2) {
          size = cached.front();
          cached.pop_front();
          cache -= size;
        }
        active += size;
        mine.push_back(size);
        note = tape.look(words_of(active, cache), nullptr);
      } else {
        std::lock_guard<std::mutex> lock(mutex);
        uint64_t size = mine.front();
        mine.pop_front();
        active -= size;
        if (random() % 2) {
          note = tape.cache_asked(words_of(active, cache), &mine);
          cache += size;
          cached.push_back(size);
        }
        auto other = tape.look(words_of(active, cache), &mine);
        note = note.entry ? note : other;
      }
      if (random() % 64 == 0) {
        std::this_thread::yield();
      }
      note.fill();
      made.fetch_add(1);
    }
  };
  int64_t active_read = 0, cache_read = 0;
  uint64_t count = 0;
  auto add = [&](const TapeEntry& entry) {
    auto size = static_cast<int64_t>(entry.size);
    bool alloc = entry.did <= Did::AllocReuse;
    active_read += alloc ? size : -size;
    cache_read += entry.did == Did::FreeToCache ? size
        : entry.did == Did::AllocReuse          ? -size
                                                : 0;
    require(active_read >= 0 && cache_read >= 0, "the order is the mutex's");
    ++count;
  };
  std::thread reader([&] {
    while (!stop.load()) {
      tape.read(tape.end(), false, add);
    }
  });
  std::vector<std::thread> workers;
  for (unsigned seed = 0; seed < 4; ++seed) {
    workers.emplace_back(work, seed);
  }
  for (auto& worker : workers) {
    worker.join();
  }
  stop = true;
  reader.join();
  tape.read(tape.end(), false, add);
  require(count == made.load(), "none is lost, none comes twice");
  require(static_cast<uint64_t>(active_read) == active, "active adds up");
  require(static_cast<uint64_t>(cache_read) == cache, "the cache adds up");
}

// Ticks of long ago are right however often the clock was looked at since.
void times() {
  TapeClock clock;
  clock.start();
  timespec pause = {0, 300000000};
  nanosleep(&pause, nullptr);
  uint64_t before = monotonic_ns();
  uint64_t ticks = TapeClock::ticks();
  uint64_t after = monotonic_ns();
  nanosleep(&pause, nullptr);
  for (int i = 0; i < 5000; ++i) {
    clock.look();
    uint64_t ns = clock.ns_of(ticks);
    require(ns + 20000 > before && ns < after + 20000, "the time is right");
  }
}

} // namespace

int main() {
  restarts();
  skipping();
  actions();
  many_threads();
  times();
  std::puts("ok");
}
