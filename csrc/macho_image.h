// The parts of a Mach-O image for arm64 that mlxmem reads, in an image that
// lies in memory as it was loaded. Asks the operating system nothing, so that
// it also runs on images that a test has mapped. Every offset and count is
// checked against the image's own segments before it is used.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "image.h"

namespace mlxmem::macho {

// ---- the format, by the names of its fields' meaning ------------------------

constexpr uint32_t kMagic64 = 0xFEEDFACF;
constexpr uint32_t kCpuArm64 = 0x0100000C;
constexpr uint32_t kSubtypeMask = 0x00FFFFFF;
constexpr uint32_t kSubtypeArm64e = 2; // its pointers are signed
constexpr uint32_t kInSharedCache = 0x80000000; // of Header::flags

enum CommandType : uint32_t {
  kSymbolTable = 0x2,
  kIndirectTable = 0xB,
  kSegment64 = 0x19,
  kDyldInfo = 0x22,
  kFunctionStarts = 0x26,
  kDyldInfoOnly = 0x80000022,
  kExportsTrie = 0x80000033,
  kChainedFixups = 0x80000034,
};

enum Protection : int32_t { kRead = 1, kWrite = 2, kExecute = 4 };

struct Header {
  uint32_t magic;
  uint32_t cpu_type;
  uint32_t cpu_subtype;
  uint32_t file_type;
  uint32_t n_commands;
  uint32_t commands_size;
  uint32_t flags;
  uint32_t reserved;
};

struct Command {
  uint32_t type;
  uint32_t size;
};

constexpr uint32_t kReadOnlyAfterFixups = 0x10; // of SegmentCommand::flags

struct SegmentCommand {
  Command command;
  char name[16]; // ends at a zero or after 16
  uint64_t address;
  uint64_t size;
  uint64_t file_offset;
  uint64_t file_size;
  int32_t max_protection;
  int32_t protection;
  uint32_t n_sections;
  uint32_t flags;
};

constexpr uint32_t kSectionTypeMask = 0xFF; // of SectionEntry::flags
constexpr uint32_t kNonLazyPointers = 6;
constexpr uint32_t kLazyPointers = 7;
constexpr uint32_t kHasInstructions = 0x80000400;

struct SectionEntry {
  char name[16];
  char segment[16];
  uint64_t address;
  uint64_t size;
  uint32_t file_offset;
  uint32_t alignment;
  uint32_t relocations_offset;
  uint32_t n_relocations;
  uint32_t flags;
  uint32_t first_indirect; // of a section of pointers
  uint32_t reserved[2];
};

struct SymbolTableCommand {
  Command command;
  uint32_t symbols_offset;
  uint32_t n_symbols;
  uint32_t names_offset;
  uint32_t names_size;
};

struct IndirectTableCommand {
  Command command;
  uint32_t other_tables[12];
  uint32_t offset;
  uint32_t n_entries;
  uint32_t relocations[4];
};

struct DyldInfoCommand {
  Command command;
  uint32_t fixups[8];
  uint32_t exports_offset;
  uint32_t exports_size;
};

struct LinkEditCommand {
  Command command;
  uint32_t offset;
  uint32_t size;
};

struct SymbolEntry {
  uint32_t name;
  uint8_t type;
  uint8_t section;
  uint16_t description;
  uint64_t value;
};

static_assert(sizeof(Header) == 32 && sizeof(SegmentCommand) == 72, "");
static_assert(sizeof(SectionEntry) == 80 && sizeof(SymbolEntry) == 16, "");
static_assert(sizeof(IndirectTableCommand) == 80, "");
static_assert(sizeof(DyldInfoCommand) == 48, "");

// Tables need not be aligned.
template <class T>
T read_at(uintptr_t address) {
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof(value));
  return value;
}

std::string name_of(const char (&field)[16]);

// ---- an image ---------------------------------------------------------------

struct Segment {
  std::string name;
  MemoryRange memory;
  uint64_t file_offset;
  uint64_t file_size;
};

struct Section {
  std::string name;
  std::string segment;
  MemoryRange memory;
  uint32_t type;
  bool is_code;
  uint32_t first_indirect; // of a section of pointers
};

class Cursor;

class MachOImage {
 public:
  // False when it is no image of this kind or its tables contradict its
  // segments. The first 16 KB from the header on must be readable, which they
  // are in a loaded image, and so must be what its segments span.
  bool read(const void* header);

  // Those that can be read.
  const std::vector<Segment>& segments() const {
    return segments_;
  }
  const std::vector<Section>& sections() const {
    return sections_;
  }

  // Names here are without the underscore that Mach-O puts before C's names;
  // a symbol that has none cannot be named. Address of an exported function or
  // variable, nullptr also for those of other images that are exported again.
  void* exported(const char* name) const;

  // dyld has overwritten what told it the names of imports; the table of
  // indirect symbols still names each pointer.
  void for_each_import(
      const std::function<void(const char* name, void** slot)>& visit) const;

 private:
  bool read_segment(uintptr_t at, size_t size);
  bool read_table(uintptr_t at, const Command& command);
  // Where a part of the file lies in memory. False when it does not.
  bool place(uint64_t offset, uint64_t size, MemoryRange* range) const;
  void* exported_at(Cursor entry) const;
  // nullptr when it does not end within the table.
  const char* symbol_name(uint32_t index) const;

  uintptr_t header_ = 0;
  uintptr_t slide_ = 0;
  std::vector<Segment> segments_;
  std::vector<Section> sections_;
  MemoryRange exports_;
  MemoryRange symbols_;
  MemoryRange names_;
  MemoryRange indirect_;
};

} // namespace mlxmem::macho

namespace mlxmem {

// Makes Images of what lies in memory.
class ImageReader {
 public:
  // False when it is no image that can be read. Leaves alone what keeps *image
  // loaded.
  static bool read(const void* header, const std::string& path, Image* image);
};

} // namespace mlxmem
