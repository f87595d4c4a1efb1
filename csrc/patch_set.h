// Edits of single words of memory that are applied together and undone
// together.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attach_error.h"

namespace mlxmem {

struct Patch {
  void** address;
  void* original;
  void* replacement;
  uintptr_t image_base; // 0: heap or static memory that is never unloaded
  std::string what; // for messages
  int protection = 0; // of its page before it was patched; apply() sets it
};

class PatchSet {
 public:
  void add(Patch patch) {
    pending_.push_back(std::move(patch));
  }

  void discard_pending() {
    pending_.clear();
  }

  // Writes every pending patch, or none: throws AttachError after taking back
  // what was written if a word does not hold its original.
  void apply();

  // Puts every original back and reads it again. A word that somebody else
  // has changed meanwhile is left alone and named in the returned text; empty
  // when all is as before. Words of images that are no longer loaded are
  // skipped. Opens no file and asks the loader nothing: a forked child may not.
  std::string undo(const std::vector<uintptr_t>& loaded_bases);

  // Forgets words of images that are gone, also where another image came to
  // lie at the same place.
  void drop_unloaded(const std::vector<uintptr_t>& loaded_bases);

  bool contains(void* const* address) const;
  const std::vector<Patch>& pending() const {
    return pending_;
  }
  const std::vector<Patch>& applied() const {
    return applied_;
  }

 private:
  std::vector<Patch> pending_;
  std::vector<Patch> applied_;
};

} // namespace mlxmem
