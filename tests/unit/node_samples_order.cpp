// Hands the samples times and places that step back: prints those that are kept.

#include <cstdio>

#include "node_samples.h"

int main() {
  static mlxmem::NodeSamples samples;
  samples.add({5, 100, 1, 1});
  samples.add({4, 99, 2, 1}); // a rough position, taken a little later
  samples.add({6, 101, 3, 0});
  for (auto& sample : samples) {
    std::printf(
        "%d %d %d\n",
        static_cast<int>(sample.event),
        static_cast<int>(sample.timestamp_us),
        static_cast<int>(sample.live));
  }
}
