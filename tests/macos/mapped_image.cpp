#include "mapped_image.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

namespace mlxmem {

namespace {

constexpr uint64_t kPage = 0x4000;
constexpr uint64_t kMaxSpan = uint64_t(1) << 30;

// ---- chained fixups ---------------------------------------------------------

struct FixupsHeader {
  uint32_t version;
  uint32_t starts_offset;
  uint32_t imports_offset;
  uint32_t names_offset;
  uint32_t n_imports;
  uint32_t imports_format;
  uint32_t names_format;
};

constexpr uint32_t kPlainImports = 1; // library: 8, weak: 1, name: 23
constexpr uint32_t kPlainNames = 0;

// Then the offset in a page where its chain starts, for each page.
struct SegmentStarts {
  uint32_t size;
  uint16_t page_size;
  uint16_t pointer_format;
  uint64_t segment_offset;
  uint32_t max_valid_pointer;
  uint16_t n_pages;
};
constexpr size_t kSegmentStartsSize = 22;

constexpr uint16_t kNoStart = 0xFFFF;
constexpr uint16_t kSeveralStarts = 0x8000;

enum PointerFormat : uint16_t { kPointer64 = 2, kPointer64Offset = 6 };

uint64_t bits(uint64_t value, int first, int n) {
  return value >> first & ((uint64_t(1) << n) - 1);
}

[[noreturn]] void fail(const std::string& what) {
  throw MapError(what);
}

} // namespace

MappedImage::MappedImage(const std::string& path, const Resolve& resolve)
    : path_(path) {
  std::ifstream in(path, std::ios::binary);
  file_.assign(std::istreambuf_iterator<char>(in), {});
  macho::Header head;
  std::memcpy(&head, bytes(0, sizeof(head)), sizeof(head));
  if (head.magic != macho::kMagic64) {
    fail("no 64-bit Mach-O file");
  }
  uint64_t offset = sizeof(head);
  for (uint32_t i = 0; i < head.n_commands; ++i) {
    macho::Command command;
    std::memcpy(&command, bytes(offset, sizeof(command)), sizeof(command));
    const char* whole = bytes(offset, command.size);
    if (command.type == macho::kSegment64 &&
        command.size >= sizeof(macho::SegmentCommand)) {
      segments_.emplace_back();
      std::memcpy(&segments_.back(), whole, sizeof(macho::SegmentCommand));
    } else if (
        command.type == macho::kChainedFixups &&
        command.size >= sizeof(macho::LinkEditCommand)) {
      macho::LinkEditCommand fixups;
      std::memcpy(&fixups, whole, sizeof(fixups));
      fixups_offset_ = fixups.offset;
      fixups_size_ = fixups.size;
    }
    offset += std::max<uint64_t>(command.size, sizeof(command));
  }
  reserve();
  copy_segments();
  if (fixups_size_) {
    apply_fixups(resolve);
  }
  protect();
}

MappedImage::Reservation::~Reservation() {
  if (range.begin) {
    munmap(reinterpret_cast<void*>(range.begin), range.end - range.begin);
  }
}

const char* MappedImage::bytes(uint64_t offset, uint64_t size) const {
  if (offset > file_.size() || size > file_.size() - offset) {
    fail("the file is too short");
  }
  return file_.data() + offset;
}

void MappedImage::reserve() {
  uint64_t begin = ~uint64_t(0);
  uint64_t end = 0;
  const macho::SegmentCommand* first = nullptr;
  for (auto& segment : segments_) {
    if (segment.address % kPage || segment.size % kPage ||
        segment.size > kMaxSpan || segment.file_size > segment.size ||
        segment.address > ~uint64_t(0) - kMaxSpan) {
      fail("a segment lies at no page");
    }
    for (auto& other : segments_) {
      if (&other != &segment && other.size &&
          other.address >= segment.address &&
          other.address < segment.address + segment.size) {
        fail("segments overlap");
      }
    }
    begin = std::min(begin, segment.address);
    end = std::max(end, segment.address + segment.size);
    if (segment.file_offset == 0 && segment.file_size && !first) {
      first = &segment;
    }
  }
  if (!first || end - begin > kMaxSpan) {
    fail("no segment holds the header, or they span too much");
  }
  // A Mac's pages are larger than this machine's, and an image begins with one.
  uint64_t size = end - begin + kPage;
  void* memory = mmap(
      nullptr,
      size,
      PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0);
  if (memory == MAP_FAILED) {
    fail("no memory");
  }
  auto& range = reserved_.range;
  range.begin = reinterpret_cast<uintptr_t>(memory);
  range.end = range.begin + size;
  slide_ = (range.begin + kPage - 1) / kPage * kPage - begin;
  header_ = first->address + slide_;
}

void MappedImage::copy_segments() {
  for (auto& segment : segments_) {
    auto memory = reinterpret_cast<void*>(segment.address + slide_);
    if (segment.size &&
        mprotect(memory, segment.size, PROT_READ | PROT_WRITE) != 0) {
      fail("a segment cannot be written");
    }
    if (segment.file_size) {
      std::memcpy(
          memory,
          bytes(segment.file_offset, segment.file_size),
          segment.file_size);
    }
  }
}

void MappedImage::apply_fixups(const Resolve& resolve) {
  const char* fixups = bytes(fixups_offset_, fixups_size_);
  auto at = [&](uint64_t offset, uint64_t size) {
    if (offset > fixups_size_ || size > fixups_size_ - offset) {
      fail("the fixups are too short");
    }
    return fixups + offset;
  };
  FixupsHeader head;
  std::memcpy(&head, at(0, sizeof(head)), sizeof(head));
  if (head.imports_format != kPlainImports ||
      head.names_format != kPlainNames) {
    fail("the imports have an unknown format");
  }
  std::vector<void*> imports;
  for (uint64_t i = 0; i < head.n_imports; ++i) {
    uint32_t entry;
    std::memcpy(&entry, at(head.imports_offset + 4 * i, 4), 4);
    uint64_t name = uint64_t(head.names_offset) + bits(entry, 9, 23);
    auto text = at(name, 1);
    std::string symbol(text, strnlen(text, fixups_size_ - name));
    imports.push_back(resolve(symbol[0] == '_' ? symbol.substr(1) : symbol));
  }
  uint32_t n_segments;
  std::memcpy(&n_segments, at(head.starts_offset, 4), 4);
  for (uint64_t i = 0; i < n_segments && i < segments_.size(); ++i) {
    uint32_t offset;
    std::memcpy(&offset, at(head.starts_offset + 4 + 4 * i, 4), 4);
    if (offset == 0) {
      continue; // the segment needs none
    }
    uint64_t place = uint64_t(head.starts_offset) + offset;
    SegmentStarts starts = {};
    std::memcpy(&starts, at(place, kSegmentStartsSize), kSegmentStartsSize);
    MemoryRange segment;
    segment.begin = segments_[i].address + slide_;
    segment.end = segment.begin + segments_[i].size;
    for (uint64_t page = 0; page < starts.n_pages; ++page) {
      uint16_t start;
      std::memcpy(&start, at(place + kSegmentStartsSize + 2 * page, 2), 2);
      if (start == kNoStart) {
        continue;
      }
      if (start & kSeveralStarts) {
        fail("a page has several chains");
      }
      apply_chain(
          segment.begin + page * starts.page_size + start,
          segment,
          starts.pointer_format,
          imports);
    }
  }
}

void MappedImage::apply_chain(
    uintptr_t word,
    MemoryRange segment,
    uint16_t format,
    const std::vector<void*>& imports) {
  if (format != kPointer64 && format != kPointer64Offset) {
    fail("the pointers have an unknown format");
  }
  while (true) {
    if (word < segment.begin || segment.end - segment.begin < 8 ||
        word > segment.end - 8) {
      fail("a chain leaves its segment");
    }
    auto place = reinterpret_cast<void*>(word);
    uint64_t value;
    std::memcpy(&value, place, sizeof(value));
    uint64_t next = bits(value, 51, 12);
    uint64_t fixed;
    if (bits(value, 63, 1)) {
      auto ordinal = bits(value, 0, 24);
      if (ordinal >= imports.size()) {
        fail("a chain names an unknown import");
      }
      fixed = reinterpret_cast<uint64_t>(imports[ordinal]) + bits(value, 24, 8);
    } else {
      fixed = (bits(value, 0, 36) + (format == kPointer64 ? slide_ : header_)) |
          bits(value, 36, 8) << 56;
    }
    std::memcpy(place, &fixed, sizeof(fixed));
    if (next == 0) {
      return;
    }
    word += 4 * next;
  }
}

void MappedImage::protect() {
  for (auto& segment : segments_) {
    bool may_write = segment.protection & macho::kWrite &&
        !(segment.flags & macho::kReadOnlyAfterFixups);
    int protection = (segment.protection & macho::kRead ? PROT_READ : 0) |
        (may_write ? PROT_WRITE : 0);
    if (segment.size &&
        mprotect(
            reinterpret_cast<void*>(segment.address + slide_),
            segment.size,
            protection) != 0) {
      fail("a segment cannot be protected");
    }
  }
}

} // namespace mlxmem
