#include "platform.h"

#if MLXMEM_MACOS

#include "control_blocks.h"

#include <array>
#include <utility>

namespace mlxmem {

namespace {

// libmlx and core.so; the rest is for extensions.
constexpr size_t kMaxTables = 64;

struct Table {
  void** vtable = nullptr; // its first virtual function
  abi::OnZeroSharedFn original = nullptr;
};

Table tables[kMaxTables];
size_t n_tables = 0;

template <size_t I>
void on_zero_shared(void* block) {
  destroy_node(block, tables[I].original);
}

template <size_t... I>
constexpr std::array<abi::OnZeroSharedFn, sizeof...(I)> make_functions(
    std::index_sequence<I...>) {
  return {{on_zero_shared<I>...}};
}

constexpr auto functions =
    make_functions(std::make_index_sequence<kMaxTables>());

} // namespace

void* on_zero_shared_replacement(void** vtable) {
  size_t i = 0;
  while (i < n_tables && tables[i].vtable != vtable) {
    ++i;
  }
  if (i == kMaxTables) {
    return nullptr;
  }
  n_tables = i == n_tables ? n_tables + 1 : n_tables;
  tables[i].vtable = vtable;
  tables[i].original =
      reinterpret_cast<abi::OnZeroSharedFn>(vtable[abi::kOnZeroShared]);
  return reinterpret_cast<void*>(functions[i]);
}

} // namespace mlxmem

#endif
