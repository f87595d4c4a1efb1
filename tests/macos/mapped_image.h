// Maps a Mach-O library into this process as dyld would, except that nothing of
// it can be executed: what mlxmem reads and patches there can be tested where
// there is no Mac.

#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "image.h"
#include "macho_image.h"

namespace mlxmem {

// The file is damaged, or of a kind that is not mapped.
class MapError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class MappedImage {
 public:
  // The address of an import; name is without the underscore that Mach-O puts
  // before C's names.
  using Resolve = std::function<void*(const std::string& name)>;

  // Throws MapError.
  MappedImage(const std::string& path, const Resolve& resolve);
  MappedImage(const MappedImage&) = delete;
  MappedImage& operator=(const MappedImage&) = delete;

  const void* header() const {
    return reinterpret_cast<const void*>(header_);
  }
  // What is added to the addresses in the file.
  uintptr_t slide() const {
    return slide_;
  }
  // False when it is no image that mlxmem reads.
  bool read(Image* image) const {
    return ImageReader::read(header(), path_, image);
  }

 private:
  struct Reservation {
    ~Reservation();
    MemoryRange range;
  };

  void reserve();
  void copy_segments();
  void apply_fixups(const Resolve& resolve);
  void apply_chain(
      uintptr_t word,
      MemoryRange segment,
      uint16_t format,
      const std::vector<void*>& imports);
  void protect();
  const char* bytes(uint64_t offset, uint64_t size) const;

  std::string path_;
  std::string file_;
  std::vector<macho::SegmentCommand> segments_;
  uint64_t fixups_offset_ = 0;
  uint64_t fixups_size_ = 0;
  Reservation reserved_;
  uintptr_t slide_ = 0;
  uintptr_t header_ = 0;
};

} // namespace mlxmem
