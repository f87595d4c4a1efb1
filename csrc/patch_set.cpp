#include "patch_set.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "page_protection.h"

namespace mlxmem {

namespace {

// Notes the protection of each word's page, as it is before a patch.
void read_protections(std::vector<Patch>* patches) {
  std::vector<uintptr_t> addresses;
  for (auto& patch : *patches) {
    addresses.push_back(reinterpret_cast<uintptr_t>(patch.address));
  }
  auto protections = page_protections(addresses);
  for (size_t i = 0; i < patches->size(); ++i) {
    auto& patch = (*patches)[i];
    patch.protection = protections[i];
    if (patch.protection < 0) {
      throw AttachError(patch.what + " is not mapped");
    }
  }
}

std::string hexadecimal(uintptr_t address) {
  char text[2 + 2 * sizeof(address) + 1];
  std::snprintf(text, sizeof(text), "0x%" PRIxPTR, address);
  return text;
}

// Makes the pages of some words writable while it lives. Neighbouring pages are
// treated together, so that a section of vtables costs two system calls.
class WritablePages {
 public:
  explicit WritablePages(const std::vector<Patch>& patches) {
    size_t page = page_size();
    std::vector<Run> pages;
    for (auto& patch : patches) {
      if (!(patch.protection & kPageWrite)) {
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
      int error = protect(changed_[i], changed_[i].protection | kPageWrite);
      if (error) {
        uintptr_t refused = changed_[i].begin;
        changed_.resize(i);
        restore();
        throw AttachError(
            "the page at " + hexadecimal(refused) +
            " cannot be made writable: " + protection_error(error));
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

  static int protect(const Run& run, int protection) {
    return protect_pages(run.begin, run.end, protection);
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
