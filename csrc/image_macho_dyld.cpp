#if defined(__APPLE__)

#include <dlfcn.h>
#include <mach-o/dyld.h>
#include <mach-o/loader.h>

#include "macho_image.h"

namespace mlxmem {

// dyld's list has no lock that others could hold. What is unloaded meanwhile
// moves the others to lower places, so an image may be missed here; it is found
// when images are looked for again. CPython unloads no module, and the system's
// libraries in the shared cache, which come and go, stay mapped.
std::vector<Image> Image::loaded(
    const std::function<bool(const Image&)>& wanted) {
  std::vector<Image> kept;
  for (uint32_t i = 0; i < _dyld_image_count(); ++i) {
    auto header = _dyld_get_image_header(i);
    auto path = _dyld_get_image_name(i);
    if (!header || !path || header->flags & macho::kInSharedCache) {
      continue;
    }
    Image image;
    image.path_ = path;
    image.base_ = reinterpret_cast<uintptr_t>(header);
    // It is kept before it is read.
    if (image.keep_loaded() && ImageReader::read(header, path, &image) &&
        wanted(image)) {
      kept.push_back(std::move(image));
    }
  }
  return kept;
}

std::vector<uintptr_t> Image::loaded_bases() {
  std::vector<uintptr_t> bases;
  for (uint32_t i = 0; i < _dyld_image_count(); ++i) {
    if (auto header = _dyld_get_image_header(i)) {
      bases.push_back(reinterpret_cast<uintptr_t>(header));
    }
  }
  return bases;
}

bool Image::keep_loaded() {
  auto header = reinterpret_cast<const void*>(base_);
  if (header == _dyld_get_image_header(0)) {
    return true; // the program itself, which dlopen refuses
  }
  void* handle = dlopen(path_.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (!handle) {
    return false;
  }
  handle_.reset(handle, dlclose);
  // Another load of the same file may have taken its place.
  Dl_info info;
  return dladdr(header, &info) && info.dli_fbase == header &&
      path_ == info.dli_fname;
}

} // namespace mlxmem

#endif
