#include "cache_state.h"

#include <new>
#include <vector>

namespace mlxmem {

void book_cache_returns(Books& books) {
  static auto* returns = new std::vector<CacheReturn>; // under the books' lock
  if (!take_cache_returns(returns)) {
    throw std::bad_alloc();
  }
  for (auto& buffer : *returns) {
    books.left_cache(buffer);
  }
}

} // namespace mlxmem
