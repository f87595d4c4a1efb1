#include "patch_set.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "image.h"

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
    return mappings;
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

// Makes the pages of some words writable while it lives. Neighbouring pages are
// treated together, so that a section of vtables costs two system calls.
class WritablePages {
 public:
  explicit WritablePages(const std::vector<Patch>& patches) {
    size_t page = sysconf(_SC_PAGESIZE);
    std::vector<uintptr_t> pages;
    for (auto& patch : patches) {
      pages.push_back(reinterpret_cast<uintptr_t>(patch.address) / page * page);
    }
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    auto mappings = memory_mappings();
    for (auto begin : pages) {
      int before = protection_of(mappings, begin);
      if (before < 0) {
        throw AttachError("the protection of a page cannot be read");
      }
      if (before & PROT_WRITE) {
        continue;
      }
      if (!changed_.empty() && changed_.back().protection == before &&
          changed_.back().end == begin) {
        changed_.back().end = begin + page;
      } else {
        changed_.push_back({begin, begin + page, before});
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

std::string PatchSet::undo() {
  std::vector<uintptr_t> bases;
  for (auto& image : Image::loaded()) {
    bases.push_back(image.base());
  }
  applied_.erase(
      std::remove_if(
          applied_.begin(),
          applied_.end(),
          [&](const Patch& patch) {
            return patch.image_base != 0 &&
                std::find(bases.begin(), bases.end(), patch.image_base) ==
                bases.end();
          }),
      applied_.end());
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
