// Prints what mlxmem reads in a Mach-O library, as lines whose words are apart
// by tabs. Addresses are from the image's beginning on. The names of the
// symbols that are looked for come from the standard input, one a line.
// usage: macho_reader_of library < names

#include <cstdio>
#include <iostream>
#include <string>

#include "macho_image.h"
#include "mapped_image.h"

using namespace mlxmem;

namespace {

char somewhere; // that imports point to

class Printer {
 public:
  explicit Printer(const void* header)
      : base_(reinterpret_cast<uintptr_t>(header)) {}

  void print(const macho::Segment& segment) const {
    std::printf("segment\t%s\t", segment.name.c_str());
    print_range(segment.memory);
    std::printf(
        "\t%zu\t%zu\n", size_t(segment.file_offset), size_t(segment.file_size));
  }

  void print(const macho::Section& section) const {
    std::printf(
        "section\t%s\t%s\t", section.segment.c_str(), section.name.c_str());
    print_range(section.memory);
    std::printf(
        "\t%u\t%d\t%u\n",
        section.type,
        section.is_code,
        section.first_indirect);
  }

  void print(const char* kind, const MemoryRange& range) const {
    std::printf("%s\t", kind);
    print_range(range);
    std::printf("\n");
  }

  void print(const char* kind, const std::string& name, const void* at) const {
    std::printf("%s\t%s\t%zu\n", kind, name.c_str(), offset(at));
  }

 private:
  size_t offset(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - base_;
  }

  void print_range(const MemoryRange& range) const {
    std::printf(
        "%zu\t%zu",
        size_t(range.begin - base_),
        size_t(range.end - range.begin));
  }

  uintptr_t base_;
};

} // namespace

int main(int, char** argv) {
  MappedImage library(
      argv[1], [](const std::string&) -> void* { return &somewhere; });
  macho::MachOImage tables;
  Image image;
  if (!tables.read(library.header()) || !library.read(&image)) {
    return 1;
  }
  Printer printer(library.header());
  for (auto& segment : tables.segments()) {
    printer.print(segment);
  }
  for (auto& section : tables.sections()) {
    printer.print(section);
  }
  tables.for_each_import([&](const char* name, void** slot) {
    printer.print("import", name, slot);
  });
  std::string name;
  while (std::getline(std::cin, name)) {
    if (auto address = tables.exported(name.c_str())) {
      printer.print("export", name, address);
    }
  }
  for (auto& range : image.code()) {
    printer.print("code", range);
  }
  for (auto& range : image.constant_data()) {
    printer.print("constant", range);
  }
  printer.print("span", image.span());
}
