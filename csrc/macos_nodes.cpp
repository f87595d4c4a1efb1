#include "platform.h"

#if MLXMEM_MACOS

#include <cstring>
#include <deque>
#include <string>

#include "control_blocks.h"
#include "facts.h"
#include "known_sites.h"
#include "macos_nodes.h"
#include "mlx_abi.h"
#include "originals.h"
#include "probes.h"
#include "rtti.h"

namespace mlxmem {

namespace {

std::vector<NodeConstructor> constructors(const MlxCore& mlx) {
  std::vector<NodeConstructor> found;
  auto add = [&](const char* symbol, bool is_leaf) {
    auto address = required_symbol(mlx.image, symbol);
    found.push_back({reinterpret_cast<uintptr_t>(address), is_leaf});
  };
  add(abi::kDescLeafCtorSymbol, true);
  add(abi::kDescLeafBaseCtorSymbol, true);
  add(abi::kDescNodeCtorSymbol, false);
  add(abi::kDescNodeBaseCtorSymbol, false);
  return found;
}

void** operator_new_slot(const Image& image) {
  void** found = nullptr;
  image.for_each_import([&](const char* name, void** slot) {
    if (std::strcmp(name, abi::kOperatorNewSymbol) == 0) {
      found = slot;
    }
  });
  return found;
}

std::vector<void**> control_blocks(const MlxCore& mlx, const Image& image) {
  std::vector<void**> found;
  for_each_vtable(image, abi::kControlBlockSlots, [&](void** vtable) {
    auto type = type_of_vtable(vtable);
    if (image.is_code(vtable[abi::kOnZeroShared]) &&
        mlx.kinds.has_one_base(type) &&
        std::strcmp(type->name(), abi::kControlBlockTypeName) == 0) {
      found.push_back(vtable);
    }
  });
  return found;
}

NodeMaker find_node_maker(
    const MlxCore& mlx,
    const Image& image,
    const std::vector<NodeConstructor>& constructors) {
  NodeMaker maker;
  maker.operator_new = operator_new_slot(image);
  maker.nodes = find_node_sites(image, maker.operator_new, constructors);
  if (!maker.nodes.sites.empty()) {
    maker.control_blocks = control_blocks(mlx, image);
  }
  return maker;
}

void check(const NodeMaker& maker, const Image& image) {
  std::string library = file_name(image);
  std::string sites = std::to_string(maker.nodes.sites.size());
  std::string calls = std::to_string(maker.nodes.constructor_calls);
  if (maker.nodes.constructor_calls) {
    require(
        maker.operator_new,
        library + " calls operator new through a slot",
        place(image, maker.operator_new),
        library + " does not call operator new through a slot");
  }
  require(
      maker.nodes.sites.size() == maker.nodes.constructor_calls,
      library + " makes as many nodes as it constructs",
      sites + " of " + calls,
      library + " makes nodes at " + sites + " places and constructs them at " +
          calls);
  if (!maker.nodes.sites.empty()) {
    require(
        !maker.control_blocks.empty(),
        library + " has a vtable for the control block of a node",
        maker.control_blocks.empty() ? "nothing"
                                     : place(image, maker.control_blocks[0]),
        library + " makes nodes whose control block is not found");
  }
}

// By path and place: a library that is loaded again is the same.
struct Known {
  std::string path;
  uintptr_t base;
  NodeMaker maker;
};

std::deque<Known>& known_makers() {
  static auto* makers = new std::deque<Known>;
  return *makers;
}

} // namespace

const NodeMaker& node_maker(const MlxCore& mlx, const Image& image) {
  auto found_constructors = constructors(mlx); // a fact of every attach
  for (auto& known : known_makers()) {
    if (known.base == image.base() && known.path == image.path()) {
      check(known.maker, image);
      return known.maker;
    }
  }
  NodeMaker found = find_node_maker(mlx, image, found_constructors);
  check(found, image);
  known_makers().push_back({image.path(), image.base(), std::move(found)});
  std::vector<NodeSite> sites;
  for (auto& known : known_makers()) {
    auto& more = known.maker.nodes.sites;
    sites.insert(sites.end(), more.begin(), more.end());
  }
  know_sites(sites);
  return known_makers().back().maker;
}

std::vector<Patch> patches_of(const NodeMaker& maker, const Image& image) {
  std::string library = file_name(image);
  require(
      !originals.operator_new ||
          reinterpret_cast<void*>(originals.operator_new) ==
              *maker.operator_new,
      library + " calls the same operator new",
      place(image, *maker.operator_new),
      library + " has another operator new");
  originals.operator_new =
      reinterpret_cast<abi::OperatorNewFn>(*maker.operator_new);
  std::vector<Patch> patches;
  patches.push_back(
      {reinterpret_cast<void**>(maker.operator_new),
       *maker.operator_new,
       reinterpret_cast<void*>(&probes::operator_new),
       image.base(),
       "the import slot of operator new"});
  for (auto vtable : maker.control_blocks) {
    void* replacement = on_zero_shared_replacement(vtable);
    require(
        replacement,
        "there is a function for each control block's vtable",
        library,
        "too many libraries make nodes");
    patches.push_back(
        {vtable + abi::kOnZeroShared,
         vtable[abi::kOnZeroShared],
         replacement,
         image.base(),
         "the control block's vtable of a node"});
  }
  return patches;
}

} // namespace mlxmem

#endif
