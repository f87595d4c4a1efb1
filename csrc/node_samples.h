// The totals of nodes over a session's time, some thousands of them however
// long it runs. Not synchronised, but for interval().

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mlxmem {

// The record that Python reads as RAW_NODE_SAMPLE.
struct NodeSample {
  uint64_t event; // number of the next one
  int64_t timestamp_us; // since the session began
  uint64_t live;
  uint64_t pending;
};
static_assert(sizeof(NodeSample) == 32, "events.py reads 32-byte records");

class NodeSamples {
 public:
  static constexpr size_t kMost = 4096;
  // A short session is seen in every detail; a sample costs as much as a node.
  static constexpr size_t kFine = 512;
  static constexpr uint32_t kCoarse = 128;

  void clear() {
    size_ = 0;
    interval_.store(1, std::memory_order_relaxed);
  }

  // After how many events, and nodes that came or went, a thread takes one.
  uint32_t interval() const {
    return interval_.load(std::memory_order_relaxed);
  }

  // In the order in which they are taken, also where the clock or a rough
  // position stepped back meanwhile.
  void add(NodeSample sample) {
    if (size_) {
      const NodeSample& last = samples_[size_ - 1];
      sample.event = std::max(sample.event, last.event);
      sample.timestamp_us = std::max(sample.timestamp_us, last.timestamp_us);
    }
    if (size_ == kMost) {
      thin_out();
    }
    samples_[size_++] = sample;
    if (size_ == kFine && interval() == 1) {
      interval_.store(kCoarse, std::memory_order_relaxed);
    }
  }

  const NodeSample* begin() const {
    return samples_;
  }
  const NodeSample* end() const {
    return samples_ + size_;
  }

 private:
  void thin_out() {
    for (size_t i = 0; i < kMost / 2; ++i) {
      samples_[i] = samples_[2 * i];
    }
    size_ = kMost / 2;
    if (interval() < 1u << 30) {
      interval_.store(interval() * 2, std::memory_order_relaxed);
    }
  }

  NodeSample samples_[kMost];
  size_t size_ = 0;
  std::atomic<uint32_t> interval_{1};
};

} // namespace mlxmem
