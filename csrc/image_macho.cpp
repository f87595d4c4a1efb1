#include "platform.h"

#if MLXMEM_MACOS

#include "macho_image.h"

namespace mlxmem {

struct ImageTables {
  macho::MachOImage image;
};

namespace {

// Vtables lie here. Before there was __DATA_CONST they lay in __DATA.
bool is_constant_data(const macho::Section& section) {
  return section.name == "__const" &&
      (section.segment == "__DATA_CONST" || section.segment == "__DATA" ||
       section.segment == "__AUTH_CONST");
}

} // namespace

bool ImageReader::read(
    const void* header,
    const std::string& path,
    Image* image) {
  auto tables = std::make_shared<ImageTables>();
  if (!tables->image.read(header)) {
    return false;
  }
  image->path_ = path;
  image->base_ = reinterpret_cast<uintptr_t>(header);
  for (auto& segment : tables->image.segments()) {
    image->mapped_.push_back(segment.memory);
  }
  for (auto& section : tables->image.sections()) {
    if (section.is_code) {
      image->code_.push_back(section.memory);
    } else if (is_constant_data(section)) {
      image->constant_data_.push_back(section.memory);
    }
  }
  image->tables_ = tables;
  return true;
}

void* Image::symbol(const char* name) const {
  return tables_ ? tables_->image.exported(name) : nullptr;
}

void Image::for_each_import(
    const std::function<void(const char* name, void** slot)>& visit) const {
  if (tables_) {
    tables_->image.for_each_import(visit);
  }
}

} // namespace mlxmem

#endif
