#include "patch_set.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace mlxmem {

namespace {

struct Mapping {
  uintptr_t begin;
  uintptr_t end;
  int protection;
};

// The process's memory mappings, in address order, as the kernel has them.
std::vector<Mapping> memory_mappings() {
  std::vector<Mapping> mappings;
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (!maps) {
    throw AttachError(
        std::string("/proc/self/maps cannot be read: ") + std::strerror(errno));
  }
  char line[512];
  bool line_start = true;
  while (std::fgets(line, sizeof(line), maps)) {
    Mapping m;
    char flags[5];
    if (line_start &&
        std::sscanf(
            line, "%" SCNxPTR "-%" SCNxPTR " %4s", &m.begin, &m.end, flags) ==
            3) {
      m.protection = (flags[0] == 'r' ? PROT_READ : 0) |
          (flags[1] == 'w' ? PROT_WRITE : 0) |
          (flags[2] == 'x' ? PROT_EXEC : 0);
      mappings.push_back(m);
    }
    line_start = std::strchr(line, '\n') != nullptr;
  }
  std::fclose(maps);
  return mappings;
}

int protection_of(const std::vector<Mapping>& mappings, uintptr_t address) {
  auto next = std::upper_bound(
      mappings.begin(),
      mappings.end(),
      address,
      [](uintptr_t a, const Mapping& m) { return a < m.begin; });
  if (next == mappings.begin() || address >= (next - 1)->end) {
    return -1;
  }
  return (next - 1)->protection;
}

// Notes the protection of each word's page, as it is before a patch.
void read_protections(std::vector<Patch>* patches) {
  auto mappings = memory_mappings();
  for (auto& patch : *patches) {
    patch.protection =
        protection_of(mappings, reinterpret_cast<uintptr_t>(patch.address));
    if (patch.protection < 0) {
      throw AttachError(patch.what + " is not mapped");
    }
  }
}

// Makes the pages of some words writable while it lives. Neighbouring pages are
// treated together, so that a section of vtables costs two system calls.
class WritablePages {
 public:
  explicit WritablePages(const std::vector<Patch>& patches) {
    size_t page = sysconf(_SC_PAGESIZE);
    std::vector<Run> pages;
    for (auto& patch : patches) {
      if (!(patch.protection & PROT_WRITE)) {
        auto begin = reinterpret_cast<uintptr_t>(patch.address) / page * page;
        pages.push_back({begin, begin + page, patch.protection});
      }
    }
    std::sort(pages.begin(), pages.end(), [](const Run& a, const Run& b) {
      return a.begin < b.begin;
    });
    for (auto& next : pages) {
      auto* last = changed_.empty() ? nullptr : &changed_.back();
      if (last && next.begin < last->end) {
        continue;
      }
      if (last && next.begin == last->end &&
          next.protection == last->protection) {
        last->end = next.end;
      } else {
        changed_.push_back(next);
      }
    }
    for (size_t i = 0; i < changed_.size(); ++i) {
      if (!protect(changed_[i], changed_[i].protection | PROT_WRITE)) {
        std::string reason = std::strerror(errno);
        changed_.resize(i);
        restore();
        throw AttachError("a page cannot be made writable: " + reason);
      }
    }
  }

  ~WritablePages() {
    restore();
  }

  WritablePages(const WritablePages&) = delete;
  WritablePages& operator=(const WritablePages&) = delete;

 private:
  struct Run {
    uintptr_t begin;
    uintptr_t end;
    int protection;
  };

  static bool protect(const Run& run, int protection) {
    return mprotect(
               reinterpret_cast<void*>(run.begin),
               run.end - run.begin,
               protection) == 0;
  }

  void restore() {
    for (auto& run : changed_) {
      protect(run, run.protection);
    }
    changed_.clear();
  }

  std::vector<Run> changed_;
};

void* load(void** address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

bool exchange(void** address, void* expected, void* desired) {
  return __atomic_compare_exchange_n(
      address, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

} // namespace

void PatchSet::apply() {
  std::vector<Patch> patches = std::move(pending_);
  pending_.clear();
  if (patches.empty()) {
    return;
  }
  read_protections(&patches);
  applied_.reserve(applied_.size() + patches.size());
  WritablePages writable(patches);
  for (size_t i = 0; i < patches.size(); ++i) {
    auto& patch = patches[i];
    if (!exchange(patch.address, patch.original, patch.replacement)) {
      while (i-- > 0) {
        exchange(
            patches[i].address, patches[i].replacement, patches[i].original);
      }
      throw AttachError(patch.what + " changed while it was being patched");
    }
  }
  for (auto& patch : patches) {
    applied_.push_back(std::move(patch));
  }
}

void PatchSet::drop_unloaded(const std::vector<uintptr_t>& loaded_bases) {
  auto gone = [&](const Patch& patch) {
    return patch.image_base != 0 &&
        (std::find(
             loaded_bases.begin(), loaded_bases.end(), patch.image_base) ==
             loaded_bases.end() ||
         load(patch.address) == patch.original);
  };
  applied_.erase(
      std::remove_if(applied_.begin(), applied_.end(), gone), applied_.end());
}

std::string PatchSet::undo(const std::vector<uintptr_t>& loaded_bases) {
  drop_unloaded(loaded_bases);
  std::string changed;
  WritablePages writable(applied_);
  for (auto patch = applied_.rbegin(); patch != applied_.rend(); ++patch) {
    exchange(patch->address, patch->replacement, patch->original);
    if (load(patch->address) != patch->original) {
      changed += (changed.empty() ? "" : ", ") + patch->what;
    }
  }
  applied_.clear();
  return changed;
}

bool PatchSet::contains(void* const* address) const {
  return std::any_of(applied_.begin(), applied_.end(), [&](const Patch& p) {
    return p.address == address;
  });
}

} // namespace mlxmem
