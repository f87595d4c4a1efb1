#include "primitive_names.h"

#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>

namespace mlxmem {

namespace {

struct Names {
  std::mutex mutex;
  std::deque<std::string> names{""}; // a deque never moves its elements
  std::unordered_map<std::string_view, PrimitiveId> ids;
};

// Never destroyed: worker threads may outlive static destructors.
Names& names() {
  static Names* instance = new Names;
  return *instance;
}

constexpr size_t kMaxNames = 1 << 16;

} // namespace

PrimitiveId intern_primitive_name(const char* name) noexcept {
  auto& n = names();
  std::lock_guard<std::mutex> lock(n.mutex);
  auto found = n.ids.find(name);
  if (found != n.ids.end()) {
    return found->second;
  }
  if (n.names.size() == kMaxNames) {
    return 0;
  }
  try {
    n.names.emplace_back(name);
    auto id = static_cast<PrimitiveId>(n.names.size() - 1);
    n.ids.emplace(n.names.back(), id);
    return id;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

const char* primitive_name(PrimitiveId id) {
  auto& n = names();
  std::lock_guard<std::mutex> lock(n.mutex);
  return id < n.names.size() ? n.names[id].c_str() : nullptr;
}

void lock_primitive_names() {
  names().mutex.lock();
}

void unlock_primitive_names() {
  names().mutex.unlock();
}

} // namespace mlxmem
