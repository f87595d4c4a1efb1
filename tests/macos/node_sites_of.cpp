// Prints where the code of MLX's two libraries for macOS makes nodes, as mlxmem
// finds it: for each library a line with the number of constructor calls, then
// one with the return address of each site, from the image's beginning on, and
// whether it makes a leaf.
// usage: node_sites_of libmlx.dylib core.so

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "mapped_image.h"
#include "mlx_abi.h"
#include "node_sites.h"

using namespace mlxmem;

namespace {

char imports[1 << 20]; // one address each; nothing is called or read there
size_t n_imports = 0;

void* some_import() {
  return imports + ++n_imports % sizeof(imports);
}

void print_sites(
    const Image& image,
    const std::vector<NodeConstructor>& constructors) {
  void** operator_new = nullptr;
  image.for_each_import([&](const char* name, void** slot) {
    if (std::strcmp(name, abi::kOperatorNewSymbol) == 0) {
      operator_new = slot;
    }
  });
  auto found = find_node_sites(image, operator_new, constructors);
  std::printf("calls %zu\n", found.constructor_calls);
  for (auto& site : found.sites) {
    std::printf(
        "%zu %d\n",
        static_cast<size_t>(site.return_address - image.base()),
        site.is_leaf);
  }
}

} // namespace

int main(int, char** argv) {
  MappedImage libmlx(argv[1], [](const std::string&) { return some_import(); });
  Image image;
  if (!libmlx.read(&image)) {
    return 1;
  }
  MappedImage core(argv[2], [&](const std::string& name) {
    void* address = image.symbol(name.c_str());
    return address ? address : some_import();
  });
  Image core_image;
  if (!core.read(&core_image)) {
    return 1;
  }
  std::vector<NodeConstructor> constructors;
  auto add = [&](const char* symbol, bool is_leaf) {
    auto address = reinterpret_cast<uintptr_t>(image.symbol(symbol));
    constructors.push_back({address, is_leaf});
  };
  add(abi::kDescLeafCtorSymbol, true);
  add(abi::kDescLeafBaseCtorSymbol, true);
  add(abi::kDescNodeCtorSymbol, false);
  add(abi::kDescNodeBaseCtorSymbol, false);
  print_sites(image, constructors);
  print_sites(core_image, constructors);
}
