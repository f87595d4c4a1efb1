#if defined(__linux__)

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "attach_error.h"
#include "page_protection.h"

namespace mlxmem {

namespace {

static_assert(
    kPageRead == PROT_READ && kPageWrite == PROT_WRITE &&
    kPageExecute == PROT_EXEC);

struct Mapping {
  uintptr_t begin;
  uintptr_t end;
  int protection;
};

// The process's memory mappings, in address order, as the kernel has them.
std::vector<Mapping> memory_mappings() {
  std::vector<Mapping> mappings;
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (!maps) {
    throw AttachError(
        std::string("/proc/self/maps cannot be read: ") + std::strerror(errno));
  }
  char line[512];
  bool line_start = true;
  while (std::fgets(line, sizeof(line), maps)) {
    Mapping m;
    char flags[5];
    if (line_start &&
        std::sscanf(
            line, "%" SCNxPTR "-%" SCNxPTR " %4s", &m.begin, &m.end, flags) ==
            3) {
      m.protection = (flags[0] == 'r' ? PROT_READ : 0) |
          (flags[1] == 'w' ? PROT_WRITE : 0) |
          (flags[2] == 'x' ? PROT_EXEC : 0);
      mappings.push_back(m);
    }
    line_start = std::strchr(line, '\n') != nullptr;
  }
  std::fclose(maps);
  return mappings;
}

int protection_of(const std::vector<Mapping>& mappings, uintptr_t address) {
  auto next = std::upper_bound(
      mappings.begin(),
      mappings.end(),
      address,
      [](uintptr_t a, const Mapping& m) { return a < m.begin; });
  if (next == mappings.begin() || address >= (next - 1)->end) {
    return -1;
  }
  return (next - 1)->protection;
}

} // namespace

size_t page_size() {
  return sysconf(_SC_PAGESIZE);
}

std::vector<int> page_protections(const std::vector<uintptr_t>& addresses) {
  auto mappings = memory_mappings();
  std::vector<int> protections;
  protections.reserve(addresses.size());
  for (uintptr_t address : addresses) {
    protections.push_back(protection_of(mappings, address));
  }
  return protections;
}

int protect_pages(uintptr_t begin, uintptr_t end, int protection) {
  auto pages = reinterpret_cast<void*>(begin);
  return mprotect(pages, end - begin, protection) == 0 ? 0 : errno;
}

std::string protection_error(int number) {
  return std::strerror(number);
}

} // namespace mlxmem

#endif
