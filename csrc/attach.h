// Puts the probes into the running MLX and takes them out again.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "facts.h"
#include "image.h"
#include "mlx_counters.h"
#include "patch_set.h"

namespace mlxmem {

// Checks every fact of mlx_abi.h on the running process, then patches all hook
// points. Throws AttachError, with nothing changed, when a fact doesn't hold.
// No effect when attached already.
void attach();

// What attach() checks and patches.
struct Check {
  bool is_attached = false; // then all of it is of the attach
  std::string refusal; // what attach() would say; empty when it would do it
  std::vector<Patch> patches; // none after a refusal
  std::vector<Image> images; // that use MLX
};

// Checks as attach() does and changes no word; visits each fact as it is noted,
// up to the first one that does not hold.
Check check_attach(const FactVisitor& visit);

// Restores every word. Returns what could not be restored, empty when all was.
std::string detach();

// The same in a child of fork(), where another thread may have held the
// loader's lock: the images are those that were loaded before it.
void detach_in_child(const std::vector<uintptr_t>& loaded_bases);

bool is_attached();

// Patches the libraries that were loaded since the last call. Returns how many
// words were changed.
size_t attach_new_images();

// The words that are changed now.
std::vector<Patch> patched_words();

// "cpu", "cuda" or "metal", by the class of the allocator; empty before the
// first attach.
std::string backend();

// The allocator's cache limit in bytes, -1 where it can't be told.
int64_t cache_limit();

// What only Metal's allocator has; false where that is not known.
bool metal_resources(MetalResources* out);

// Around fork(), see hook_api.cpp.
void lock_attach();
void unlock_attach();

} // namespace mlxmem
