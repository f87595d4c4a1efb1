#include "platform.h"

#if !MLXMEM_MACOS

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstring>

#include "image.h"

namespace mlxmem {

struct ImageTables {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const uint32_t* gnu_hash = nullptr;
  const ElfW(Rela) * import_relocations = nullptr;
  size_t import_relocations_size = 0;
};

namespace {

#if defined(__x86_64__)
constexpr uint32_t kJumpSlot = R_X86_64_JUMP_SLOT;
#elif defined(__aarch64__)
constexpr uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT;
#else
#error "mlxmem knows the import slots of x86-64 and aarch64 only"
#endif

uint32_t gnu_hash(const char* name) {
  uint32_t h = 5381;
  for (; *name; ++name) {
    h = h * 33 + static_cast<unsigned char>(*name);
  }
  return h;
}

} // namespace

class ImageReader {
 public:
  explicit ImageReader(const std::function<bool(const Image&)>& wanted)
      : wanted_(wanted) {}

  // Runs while the loader's lock keeps the image where it is.
  static int add(dl_phdr_info* info, size_t, void* self) {
    auto& reader = *static_cast<ImageReader*>(self);
    Image image;
    if (read(*info, &image) && reader.wanted_(image)) {
      reader.images.push_back(std::move(image));
    }
    return 0;
  }

  std::vector<Image> images;

 private:
  static bool read(const dl_phdr_info& info, Image* image) {
    image->path_ = info.dlpi_name ? info.dlpi_name : "";
    image->base_ = info.dlpi_addr;
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr) & header = info.dlpi_phdr[i];
      MemoryRange range;
      range.begin = info.dlpi_addr + header.p_vaddr;
      range.end = range.begin + header.p_memsz;
      if (header.p_type == PT_LOAD) {
        image->mapped_.push_back(range);
        if (header.p_flags & PF_X) {
          image->code_.push_back(range);
        }
      } else if (header.p_type == PT_GNU_RELRO) {
        image->constant_data_.push_back(range);
      } else if (header.p_type == PT_DYNAMIC) {
        dynamic = reinterpret_cast<const ElfW(Dyn)*>(range.begin);
      }
    }
    if (!dynamic) {
      return false;
    }
    // glibc has relocated these pointers, other loaders leave them relative.
    auto absolute = [&](ElfW(Addr) address) {
      return address < info.dlpi_addr ? address + info.dlpi_addr : address;
    };
    auto tables = std::make_shared<ImageTables>();
    bool rela = true;
    for (auto* entry = dynamic; entry->d_tag != DT_NULL; ++entry) {
      auto address = absolute(entry->d_un.d_ptr);
      switch (entry->d_tag) {
        case DT_SYMTAB:
          tables->symbols = reinterpret_cast<const ElfW(Sym)*>(address);
          break;
        case DT_STRTAB:
          tables->names = reinterpret_cast<const char*>(address);
          break;
        case DT_GNU_HASH:
          tables->gnu_hash = reinterpret_cast<const uint32_t*>(address);
          break;
        case DT_JMPREL:
          tables->import_relocations =
              reinterpret_cast<const ElfW(Rela)*>(address);
          break;
        case DT_PLTRELSZ:
          tables->import_relocations_size = entry->d_un.d_val;
          break;
        case DT_PLTREL:
          rela = entry->d_un.d_val == DT_RELA;
          break;
      }
    }
    if (!rela) {
      tables->import_relocations_size = 0;
    }
    image->tables_ = tables;
    return tables->symbols && tables->names;
  }

  const std::function<bool(const Image&)>& wanted_;
};

std::vector<Image> Image::loaded(
    const std::function<bool(const Image&)>& wanted) {
  ImageReader reader(wanted);
  dl_iterate_phdr(ImageReader::add, &reader);
  std::vector<Image> kept;
  for (auto& image : reader.images) {
    if (image.keep_loaded()) {
      kept.push_back(std::move(image));
    }
  }
  return kept;
}

std::vector<uintptr_t> Image::loaded_bases() {
  std::vector<uintptr_t> bases;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        static_cast<std::vector<uintptr_t>*>(out)->push_back(info->dlpi_addr);
        return 0;
      },
      &bases);
  return bases;
}

bool Image::keep_loaded() {
  void* handle =
      dlopen(path_.empty() ? nullptr : path_.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (!handle) {
    return false;
  }
  handle_.reset(handle, dlclose);
  link_map* map = nullptr;
  // Another load of the same file may have taken its place.
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_addr == base_;
}

void* Image::symbol(const char* name) const {
  auto table = tables_ ? tables_->gnu_hash : nullptr;
  if (!table) {
    return nullptr;
  }
  uint32_t n_buckets = table[0];
  uint32_t first = table[1];
  uint32_t bloom_words = table[2];
  auto* buckets = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4);
  auto* chain = buckets + n_buckets;
  auto* symbols = tables_->symbols;
  uint32_t h = gnu_hash(name);
  uint32_t i = n_buckets ? buckets[h % n_buckets] : 0;
  if (i < first) {
    return nullptr;
  }
  for (;; ++i) {
    uint32_t entry = chain[i - first];
    if ((entry | 1) == (h | 1) && symbols[i].st_shndx != SHN_UNDEF &&
        std::strcmp(tables_->names + symbols[i].st_name, name) == 0) {
      return reinterpret_cast<void*>(base_ + symbols[i].st_value);
    }
    if (entry & 1) { // the chain's last entry
      return nullptr;
    }
  }
}

void Image::for_each_import(
    const std::function<void(const char* name, void** slot)>& visit) const {
  if (!tables_) {
    return;
  }
  auto* relocation = tables_->import_relocations;
  size_t n = tables_->import_relocations_size / sizeof(ElfW(Rela));
  for (size_t i = 0; i < n; ++i) {
    if (ELF64_R_TYPE(relocation[i].r_info) == kJumpSlot) {
      auto& symbol = tables_->symbols[ELF64_R_SYM(relocation[i].r_info)];
      visit(
          tables_->names + symbol.st_name,
          reinterpret_cast<void**>(base_ + relocation[i].r_offset));
    }
  }
}

} // namespace mlxmem

#endif
