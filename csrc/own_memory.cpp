#include "own_memory.h"

#if defined(__linux__)
#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <mach/mach.h>
#endif

#include <algorithm>

namespace mlxmem {

#if defined(__linux__)

namespace {

constexpr size_t kMostPieces = 1024; // IOV_MAX of Linux

// How many of the pieces were read before one that can't be; -1: not offered.
ssize_t
read_pieces(const void* const* addresses, size_t n, size_t size, char* out) {
  iovec pieces[kMostPieces];
  for (size_t i = 0; i < n; ++i) {
    pieces[i] = {const_cast<void*>(addresses[i]), size};
  }
  iovec target = {out, n * size};
  ssize_t bytes = process_vm_readv(getpid(), &target, 1, pieces, n, 0);
  if (bytes < 0) {
    return errno == EFAULT ? 0 : -1;
  }
  return bytes / static_cast<ssize_t>(size);
}

class MemoryFile {
 public:
  MemoryFile() : file_(open("/proc/self/mem", O_RDONLY | O_CLOEXEC)) {}
  ~MemoryFile() {
    if (file_ >= 0) {
      close(file_);
    }
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  bool is_open() const {
    return file_ >= 0;
  }
  bool read(const void* address, size_t size, char* out) const {
    auto offset = static_cast<off_t>(reinterpret_cast<uintptr_t>(address));
    return pread(file_, out, size, offset) == static_cast<ssize_t>(size);
  }

 private:
  int file_;
};

} // namespace

bool read_own_memory(
    const std::vector<const void*>& addresses,
    size_t size,
    void* out,
    std::vector<bool>* readable) {
  auto target = static_cast<char*>(out);
  readable->assign(addresses.size(), false);
  size_t at = 0;
  while (at < addresses.size()) {
    size_t n = std::min(kMostPieces, addresses.size() - at);
    ssize_t done = read_pieces(&addresses[at], n, size, target + at * size);
    if (done < 0) {
      break;
    }
    std::fill_n(readable->begin() + at, done, true);
    at += static_cast<size_t>(done) == n ? n : done + 1;
  }
  if (at == addresses.size()) {
    return true;
  }
  // Sandboxes that forbid the one often allow the other.
  MemoryFile file;
  for (; file.is_open() && at < addresses.size(); ++at) {
    (*readable)[at] = file.read(addresses[at], size, target + at * size);
  }
  return file.is_open();
}

#elif defined(__APPLE__)

// A call for each: there is none that reads several places.
bool read_own_memory(
    const std::vector<const void*>& addresses,
    size_t size,
    void* out,
    std::vector<bool>* readable) {
  auto target = reinterpret_cast<vm_address_t>(out);
  readable->assign(addresses.size(), false);
  for (size_t i = 0; i < addresses.size(); ++i, target += size) {
    vm_size_t copied = 0;
    kern_return_t status = vm_read_overwrite(
        mach_task_self(),
        reinterpret_cast<vm_address_t>(addresses[i]),
        size,
        target,
        &copied);
    (*readable)[i] = status == KERN_SUCCESS && copied == size;
  }
  return true;
}

#else

bool read_own_memory(
    const std::vector<const void*>&,
    size_t,
    void*,
    std::vector<bool>*) {
  return false;
}

#endif

} // namespace mlxmem
