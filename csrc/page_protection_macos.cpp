#if defined(__APPLE__)

#include <mach/mach.h>
#include <unistd.h>

#include "page_protection.h"

namespace mlxmem {

namespace {

static_assert(
    kPageRead == VM_PROT_READ && kPageWrite == VM_PROT_WRITE &&
    kPageExecute == VM_PROT_EXECUTE);

// vm_ and mach_vm_ functions are the same where addresses have 64 bits.
static_assert(sizeof(vm_address_t) == sizeof(uintptr_t));

struct Region {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int protection = -1;
};

// The region around an address, or the gap before the next one.
Region region_around(uintptr_t address) {
  vm_address_t begin = address;
  vm_size_t size = 0;
  vm_region_basic_info_data_64_t info;
  mach_msg_type_number_t count = VM_REGION_BASIC_INFO_COUNT_64;
  mach_port_t unused = MACH_PORT_NULL;
  kern_return_t status = vm_region_64(
      mach_task_self(),
      &begin,
      &size,
      VM_REGION_BASIC_INFO_64,
      reinterpret_cast<vm_region_info_t>(&info),
      &count,
      &unused);
  if (status != KERN_SUCCESS) {
    return {address, UINTPTR_MAX, -1}; // it lies above all of them
  }
  if (begin > address) {
    return {address, begin, -1};
  }
  return {begin, begin + size, info.protection};
}

} // namespace

size_t page_size() {
  return sysconf(_SC_PAGESIZE);
}

std::vector<int> page_protections(const std::vector<uintptr_t>& addresses) {
  std::vector<int> protections;
  protections.reserve(addresses.size());
  Region region;
  for (uintptr_t address : addresses) {
    if (address < region.begin || address >= region.end) {
      region = region_around(address);
    }
    protections.push_back(region.protection);
  }
  return protections;
}

int protect_pages(uintptr_t begin, uintptr_t end, int protection) {
  // Pages that lie in a file are shared with other processes until written.
  int copy = protection & kPageWrite ? VM_PROT_COPY : 0;
  return vm_protect(
      mach_task_self(), begin, end - begin, false, protection | copy);
}

std::string protection_error(int number) {
  return std::string(mach_error_string(number)) + " (kern_return " +
      std::to_string(number) + ")";
}

} // namespace mlxmem

#endif
