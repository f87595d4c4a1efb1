#include "platform.h"

#if MLXMEM_MACOS

#include "known_sites.h"

#include <algorithm>
#include <atomic>

namespace mlxmem {

namespace {

// Open addressing, a third full at most.
class SiteTable {
 public:
  explicit SiteTable(const std::vector<NodeSite>& sites) {
    size_t size = 64;
    while (size < 3 * sites.size()) {
      size *= 2;
    }
    entries_.resize(size);
    for (auto& site : sites) {
      size_t at = place(site.return_address);
      while (entries_[at].return_address) {
        at = (at + 1) % entries_.size();
      }
      entries_[at] = site;
    }
  }

  MadeHere find(uintptr_t return_address) const {
    for (size_t at = place(return_address); entries_[at].return_address;
         at = (at + 1) % entries_.size()) {
      if (entries_[at].return_address == return_address) {
        return entries_[at].is_leaf ? MadeHere::Leaf : MadeHere::Node;
      }
    }
    return MadeHere::Nothing;
  }

 private:
  size_t place(uintptr_t address) const {
    return (address >> 2) * 0x9E3779B1u % entries_.size();
  }

  std::vector<NodeSite> entries_;
};

std::atomic<const SiteTable*> table{nullptr};

} // namespace

void know_sites(const std::vector<NodeSite>& sites) {
  table.store(new SiteTable(sites), std::memory_order_release);
}

MadeHere made_at(const void* return_address) {
  auto known = table.load(std::memory_order_acquire);
  return known ? known->find(reinterpret_cast<uintptr_t>(return_address))
               : MadeHere::Nothing;
}

} // namespace mlxmem

#endif
