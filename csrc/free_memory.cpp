#include "free_memory.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <mach/mach.h>
#endif

namespace mlxmem {

#if defined(__linux__)

namespace {

constexpr int64_t kUnknown = -1;

// The beginning of a small file, as text.
class SmallFile {
 public:
  explicit SmallFile(const char* path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file >= 0 ? read(file, text_, sizeof(text_) - 1) : -1;
    if (file >= 0) {
      close(file);
    }
    text_[std::max<ssize_t>(size, 0)] = 0;
  }
  char* text() {
    return text_;
  }
  // The number that follows a word.
  int64_t after(const char* word) {
    auto found = std::strstr(text_, word);
    char* end = nullptr;
    auto begin = found ? found + std::strlen(word) : nullptr;
    int64_t value = found ? std::strtoll(begin, &end, 10) : 0;
    return found && end != begin ? value : kUnknown;
  }

 private:
  char text_[4096];
};

int64_t left_of_address_space() {
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return kUnknown;
  }
  int64_t pages = SmallFile("/proc/self/statm").after("");
  if (pages < 0) {
    return kUnknown;
  }
  int64_t used = pages * sysconf(_SC_PAGESIZE);
  return std::max<int64_t>(static_cast<int64_t>(limit.rlim_cur) - used, 0);
}

int64_t least(int64_t a, int64_t b) {
  return a < 0 ? b : b < 0 ? a : std::min(a, b);
}

// Each group up to the root can have a limit of its own.
int64_t left_of_control_groups() {
  SmallFile groups("/proc/self/cgroup");
  char* group = std::strstr(groups.text(), "0::/");
  if (!group) {
    return kUnknown;
  }
  group += 3;
  group[std::strcspn(group, "\n")] = 0;
  int64_t left = kUnknown;
  for (;;) {
    char path[4096 + 64];
    std::snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.max", group);
    int64_t limit = SmallFile(path).after("");
    std::snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.current", group);
    int64_t used = SmallFile(path).after("");
    if (limit >= 0 && used >= 0) {
      left = least(left, std::max<int64_t>(limit - used, 0));
    }
    char* slash = std::strrchr(group, '/');
    if (!slash) {
      return left;
    }
    *slash = 0;
  }
}

} // namespace

int64_t free_host_memory() {
  int64_t available = SmallFile("/proc/meminfo").after("MemAvailable:");
  if (available >= 0) {
    available *= 1024;
  }
  return least(
      least(available, left_of_address_space()), left_of_control_groups());
}

int64_t free_cuda_memory() {
  // MLX's CUDA runtime has loaded it.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  auto memory_info = reinterpret_cast<int (*)(size_t*, size_t*)>(
      driver ? dlsym(driver, "cuMemGetInfo_v2") : nullptr);
  size_t free = 0;
  size_t total = 0;
  bool is_known = memory_info && memory_info(&free, &total) == 0;
  if (driver) {
    dlclose(driver);
  }
  return is_known ? static_cast<int64_t>(free) : kUnknown;
}

#else

int64_t free_cuda_memory() {
  return -1;
}

#if defined(__APPLE__)

// The limit that os_proc_available_memory() tells is one of iOS.
int64_t free_host_memory() {
  mach_port_t host = mach_host_self();
  vm_statistics64_data_t pages;
  mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
  vm_size_t page = 0;
  bool is_known = host_page_size(host, &page) == KERN_SUCCESS &&
      host_statistics64(
          host,
          HOST_VM_INFO64,
          reinterpret_cast<host_info64_t>(&pages),
          &count) == KERN_SUCCESS;
  mach_port_deallocate(mach_task_self(), host);
  // Inactive ones are taken before the system compresses or swaps.
  return is_known ? static_cast<int64_t>(pages.free_count) * page +
          static_cast<int64_t>(pages.inactive_count) * page
                  : -1;
}

#else

int64_t free_host_memory() {
  return -1;
}

#endif

#endif

} // namespace mlxmem
