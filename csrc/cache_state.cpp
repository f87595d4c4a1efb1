#include "cache_state.h"

#include <new>
#include <vector>

namespace mlxmem {

void book_cache_returns(Books& books) {
  static auto* returns = new std::vector<CacheReturn>; // under the books' lock
  if (!take_cache_returns(returns)) {
    throw std::bad_alloc();
  }
  // MLX sets a limit before it trims the cache: the one that made it return
  // these is there now.
  Limits limits;
  if (!returns->empty() && mlx_counters.peek_limits(&limits)) {
    books.observe_limits(limits, returns->front().time_ns);
  }
  for (auto& buffer : *returns) {
    books.left_cache(buffer);
  }
}

} // namespace mlxmem
