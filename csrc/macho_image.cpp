#include "platform.h"

#if MLXMEM_MACOS

#include <algorithm>

#include "macho_image.h"

namespace mlxmem::macho {

// Reads within a range; ok() is false once it went beyond.
class Cursor {
 public:
  Cursor(MemoryRange range, uint64_t offset) : end_(range.end) {
    ok_ = offset <= range.end - range.begin;
    at_ = ok_ ? range.begin + offset : range.end;
  }

  bool ok() const {
    return ok_;
  }

  uint8_t byte() {
    ok_ = ok_ && at_ < end_;
    return ok_ ? *reinterpret_cast<const uint8_t*>(at_++) : 0;
  }

  uint64_t uleb128() {
    uint64_t value = 0;
    for (int shift = 0; ok_; shift += 7) {
      uint8_t next = byte();
      if (shift >= 63 && next > 1) {
        ok_ = false;
      } else {
        value |= uint64_t(next & 0x7F) << shift;
      }
      if (!(next & 0x80)) {
        break;
      }
    }
    return ok_ ? value : 0;
  }

  void skip(uint64_t size) {
    ok_ = ok_ && size <= end_ - at_;
    at_ += ok_ ? size : 0;
  }

  // Whether the text here, up to its zero, is the beginning of name. Goes
  // behind the zero either way.
  bool is_prefix(const char* name, size_t* length) {
    bool same = true;
    *length = 0;
    for (uint8_t c = byte(); c; c = byte()) {
      same = same && static_cast<uint8_t>(name[*length]) == c;
      *length += same;
    }
    return same && ok_;
  }

 private:
  uintptr_t at_;
  uintptr_t end_;
  bool ok_;
};

namespace {

// A page of arm64 macOS: the least that is mapped from the header on.
constexpr size_t kPage = 0x4000;
// More than any image spans; sums of two such numbers do not overflow.
constexpr uint64_t kMaxSpan = uint64_t(1) << 40;

constexpr uint32_t kNoIndirectSymbol = 0xC0000000; // local or absolute

// An entry of the exports trie.
constexpr uint64_t kExportKindMask = 0x03; // 0: an address in the image
constexpr uint64_t kExportOfOtherImage = 0x08;
constexpr uint64_t kExportWithResolver = 0x10;

// Whether size bytes from begin on lie in [outer_begin, outer_begin +
// outer_size).
bool lies_in(
    uint64_t begin,
    uint64_t size,
    uint64_t outer_begin,
    uint64_t outer_size) {
  return begin >= outer_begin && begin - outer_begin <= outer_size &&
      size <= outer_size - (begin - outer_begin);
}

struct PlacedCommand {
  uintptr_t at;
  Command command;
};

// The commands that lie whole within size bytes.
std::vector<PlacedCommand>
list_commands(uintptr_t at, size_t size, uint32_t n_commands) {
  std::vector<PlacedCommand> commands;
  while (commands.size() < n_commands && size >= sizeof(Command)) {
    auto command = read_at<Command>(at);
    if (command.size < sizeof(Command) || command.size > size) {
      break;
    }
    commands.push_back({at, command});
    at += command.size;
    size -= command.size;
  }
  return commands;
}

template <class T>
bool read_command(const PlacedCommand& placed, T* command) {
  if (placed.command.size < sizeof(T)) {
    return false;
  }
  *command = read_at<T>(placed.at);
  return true;
}

} // namespace

std::string name_of(const char (&field)[16]) {
  return std::string(field, strnlen(field, sizeof(field)));
}

bool MachOImage::read(const void* header) {
  header_ = reinterpret_cast<uintptr_t>(header);
  auto head = read_at<Header>(header_);
  if (head.magic != kMagic64 || head.cpu_type != kCpuArm64 ||
      (head.cpu_subtype & kSubtypeMask) == kSubtypeArm64e) {
    return false;
  }
  // Only the segment that holds the header says how far one may read.
  auto first = header_ + sizeof(Header);
  size_t size = std::min<size_t>(head.commands_size, kPage - sizeof(Header));
  SegmentCommand segment;
  bool found = false;
  for (auto& placed : list_commands(first, size, head.n_commands)) {
    if (placed.command.type == kSegment64 && !found) {
      found = read_command(placed, &segment) && segment.file_offset == 0 &&
          segment.file_size >= sizeof(Header);
    }
  }
  if (!found || !(segment.protection & kRead) ||
      head.commands_size > segment.file_size - sizeof(Header) ||
      segment.file_size > segment.size) {
    return false;
  }
  slide_ = header_ - segment.address;
  auto commands = list_commands(first, head.commands_size, head.n_commands);
  if (commands.size() != head.n_commands) {
    return false;
  }
  for (auto& [at, command] : commands) {
    if (command.type == kSegment64 && !read_segment(at, command.size)) {
      return false;
    }
  }
  for (auto& [at, command] : commands) {
    if (!read_table(at, command)) {
      return false;
    }
  }
  return true;
}

bool MachOImage::read_segment(uintptr_t at, size_t size) {
  if (size < sizeof(SegmentCommand)) {
    return false;
  }
  auto segment = read_at<SegmentCommand>(at);
  if (!(segment.protection & kRead) || segment.size == 0) {
    return true;
  }
  auto begin = segment.address + slide_;
  if (segment.size > kMaxSpan || begin + segment.size < begin ||
      segment.file_size > segment.size ||
      segment.n_sections > (size - sizeof(segment)) / sizeof(SectionEntry)) {
    return false;
  }
  segments_.push_back(
      {name_of(segment.name),
       {begin, begin + segment.size},
       segment.file_offset,
       segment.file_size});
  bool is_code = segment.protection & kExecute;
  for (uint32_t i = 0; i < segment.n_sections; ++i) {
    auto section =
        read_at<SectionEntry>(at + sizeof(segment) + i * sizeof(SectionEntry));
    if (!lies_in(
            section.address, section.size, segment.address, segment.size)) {
      return false;
    }
    auto from = section.address + slide_;
    sections_.push_back(
        {name_of(section.name),
         segments_.back().name,
         {from, from + section.size},
         section.flags & kSectionTypeMask,
         is_code && (section.flags & kHasInstructions),
         section.first_indirect});
  }
  return true;
}

bool MachOImage::read_table(uintptr_t at, const Command& command) {
  PlacedCommand placed = {at, command};
  switch (command.type) {
    case kSymbolTable: {
      SymbolTableCommand table;
      return read_command(placed, &table) &&
          place(table.symbols_offset,
                uint64_t(table.n_symbols) * sizeof(SymbolEntry),
                &symbols_) &&
          place(table.names_offset, table.names_size, &names_);
    }
    case kIndirectTable: {
      IndirectTableCommand table;
      return read_command(placed, &table) &&
          place(table.offset,
                uint64_t(table.n_entries) * sizeof(uint32_t),
                &indirect_);
    }
    case kDyldInfo:
    case kDyldInfoOnly: {
      DyldInfoCommand info;
      return read_command(placed, &info) &&
          place(info.exports_offset, info.exports_size, &exports_);
    }
    case kExportsTrie: {
      LinkEditCommand table;
      return read_command(placed, &table) &&
          place(table.offset, table.size, &exports_);
    }
    default:
      return true;
  }
}

bool MachOImage::place(uint64_t offset, uint64_t size, MemoryRange* range)
    const {
  if (size == 0) {
    return true;
  }
  for (auto& segment : segments_) {
    if (lies_in(offset, size, segment.file_offset, segment.file_size)) {
      range->begin = segment.memory.begin + (offset - segment.file_offset);
      range->end = range->begin + size;
      return true;
    }
  }
  return false;
}

void* MachOImage::exported(const char* name) const {
  std::string symbol = std::string("_") + name;
  const char* rest = symbol.c_str();
  uint64_t offset = 0;
  while (true) { // every step takes something from rest, or is the last
    Cursor node(exports_, offset);
    uint64_t info_size = node.uleb128();
    if (*rest == 0) {
      return info_size ? exported_at(node) : nullptr;
    }
    node.skip(info_size);
    const char* before = rest;
    for (int n_children = node.byte(); n_children && rest == before;
         --n_children) {
      size_t length;
      bool matches = node.is_prefix(rest, &length);
      uint64_t child = node.uleb128();
      if (matches && node.ok()) {
        rest += length;
        offset = child;
      }
    }
    if (rest == before) {
      return nullptr;
    }
  }
}

void* MachOImage::exported_at(Cursor entry) const {
  uint64_t flags = entry.uleb128();
  uint64_t offset = entry.uleb128();
  if (!entry.ok() ||
      flags & (kExportKindMask | kExportOfOtherImage | kExportWithResolver)) {
    return nullptr;
  }
  auto address = reinterpret_cast<void*>(header_ + offset);
  for (auto& segment : segments_) {
    if (segment.memory.contains(address)) {
      return address;
    }
  }
  return nullptr;
}

void MachOImage::for_each_import(
    const std::function<void(const char* name, void** slot)>& visit) const {
  size_t n_entries = (indirect_.end - indirect_.begin) / sizeof(uint32_t);
  for (auto& section : sections_) {
    if (section.type != kNonLazyPointers && section.type != kLazyPointers) {
      continue;
    }
    size_t n = (section.memory.end - section.memory.begin) / sizeof(void*);
    if (section.memory.begin % alignof(void*) ||
        section.first_indirect > n_entries ||
        n > n_entries - section.first_indirect) {
      continue;
    }
    for (size_t i = 0; i < n; ++i) {
      auto entry =
          indirect_.begin + (section.first_indirect + i) * sizeof(uint32_t);
      auto index = read_at<uint32_t>(entry);
      auto name = index & kNoIndirectSymbol ? nullptr : symbol_name(index);
      if (name && *name == '_') {
        visit(name + 1, reinterpret_cast<void**>(section.memory.begin) + i);
      }
    }
  }
}

const char* MachOImage::symbol_name(uint32_t index) const {
  if (index >= (symbols_.end - symbols_.begin) / sizeof(SymbolEntry)) {
    return nullptr;
  }
  auto entry =
      read_at<SymbolEntry>(symbols_.begin + index * sizeof(SymbolEntry));
  size_t size = names_.end - names_.begin;
  auto name = reinterpret_cast<const char*>(names_.begin + entry.name);
  bool ends = entry.name < size && std::memchr(name, 0, size - entry.name);
  return ends ? name : nullptr;
}

} // namespace mlxmem::macho

#endif
