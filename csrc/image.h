// A shared library or program that is loaded in this process: its symbols, its
// import slots, its memory ranges. image.cpp holds what is the same everywhere;
// there is one implementation file for each format of images.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mlxmem {

struct ImageTables; // what an image format keeps of its tables

struct MemoryRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool contains(const void* address) const {
    auto a = reinterpret_cast<uintptr_t>(address);
    return a >= begin && a < end;
  }
};

class Image {
 public:
  // The images for which wanted(image) holds, in load order. They stay loaded
  // as long as their Image objects live.
  static std::vector<Image> loaded(
      const std::function<bool(const Image&)>& wanted);

  // Where every image of the process lies.
  static std::vector<uintptr_t> loaded_bases();

  const std::string& path() const {
    return path_;
  }
  // Where the image lies; tells one load of a file from the next.
  uintptr_t base() const {
    return base_;
  }
  bool contains(const void* address) const;
  bool is_code(const void* address) const {
    return code_of(address).end != 0;
  }
  // The executable range around an address, an empty one when there is none.
  MemoryRange code_of(const void* address) const;
  const std::vector<MemoryRange>& code() const {
    return code_;
  }
  // From the first mapped byte to the last.
  MemoryRange span() const;

  // Address of a dynamic symbol that this image defines, or nullptr.
  void* symbol(const char* name) const;

  // Calls visit(name, slot) for every function that this image imports through
  // a word of its own.
  void for_each_import(
      const std::function<void(const char* name, void** slot)>& visit) const;

  // Data that the loader makes read-only after relocation; vtables lie here.
  const std::vector<MemoryRange>& constant_data() const {
    return constant_data_;
  }

 private:
  friend class ImageReader;

  // False when it is gone.
  bool keep_loaded();

  std::string path_;
  std::shared_ptr<void> handle_;
  uintptr_t base_ = 0;
  std::vector<MemoryRange> mapped_;
  std::vector<MemoryRange> code_;
  std::vector<MemoryRange> constant_data_;
  std::shared_ptr<const ImageTables> tables_;
};

} // namespace mlxmem
