// An extension module that uses MLX: a primitive of its own, and buffers that do not
// come through the allocator's vtable. Its functions are called through ctypes.

#include <Python.h>

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "mlx/version.h"

namespace mx = mlx::core;

namespace {

#if MLX_VERSION_NUMERIC >= 32004
void bind(mx::array& a, void* buffer, bool owned) {
  auto free = [](mx::allocator::Buffer b) { mx::allocator::allocator().free(b); };
  mx::allocator::Deleter deleter = [](mx::allocator::Buffer) {};
  if (owned) {
    deleter = free;
  }
  a.set_data(
      mx::allocator::Data(mx::allocator::Buffer(buffer), std::move(deleter)));
}
#else
void bind(mx::array& a, void* buffer, bool owned) {
  mx::Deleter deleter = [](mx::allocator::Buffer) {};
  if (owned) {
    deleter = mx::allocator::free;
  }
  a.set_data(mx::allocator::Buffer(buffer), deleter);
}
#endif

// Fills its output with 7 and needs a scratch buffer of 640 bytes for it. Throws
// when told to, after the scratch was allocated.
class ProbeFill : public mx::Primitive {
 public:
  ProbeFill(mx::Stream stream, bool fails)
      : mx::Primitive(stream), fails_(fails) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs)
      override {
    mx::array scratch({160}, mx::float32, nullptr, {});
    scratch.set_data(mx::allocator::malloc(scratch.nbytes()));
    if (fails_) {
      throw std::invalid_argument("[ProbeFill] was told to fail");
    }
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    for (size_t i = 0; i < out.size(); ++i) {
      out.data<float>()[i] = 7;
    }
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&)
      override {
    throw std::runtime_error("no GPU here");
  }

  const char* name() const override {
    return "ProbeFill";
  }

 private:
  bool fails_;
};

using MallocFn = mx::allocator::Buffer (*)(mx::allocator::Allocator*, size_t);
MallocFn real_malloc = nullptr;
const char* error = "";

// MLX's CPU allocator never throws by itself. But it locks a mutex, and a lock that
// fails is a std::system_error, thrown inside malloc.
std::atomic<bool> next_malloc_fails{false};

int failing_lock(pthread_mutex_t* mutex) {
  auto caller = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  auto malloc = reinterpret_cast<uintptr_t>(real_malloc);
  if (caller - malloc < 256 && next_malloc_fails.exchange(false)) {
    return EINVAL;
  }
  return pthread_mutex_lock(mutex);
}

// Replaces pthread_mutex_lock in the import slots of the library that malloc is in.
int replace_lock(dl_phdr_info* info, size_t, void* found) {
  auto malloc = reinterpret_cast<uintptr_t>(real_malloc) - info->dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  bool contains = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    auto& part = info->dlpi_phdr[i];
    contains |= part.p_type == PT_LOAD && malloc - part.p_vaddr < part.p_memsz;
    if (part.p_type == PT_DYNAMIC) {
      dynamic =
          reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + part.p_vaddr);
    }
  }
  if (!contains || !dynamic) {
    return 0;
  }
  const char* names = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const ElfW(Rela)* slots = nullptr;
  size_t size = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    auto address = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(address);
        break;
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(address);
        break;
      case DT_JMPREL:
        slots = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_PLTRELSZ:
        size = dynamic->d_un.d_val;
        break;
    }
  }
  for (size_t i = 0; slots && i < size / sizeof(*slots); ++i) {
    auto& symbol = symbols[ELF64_R_SYM(slots[i].r_info)];
    if (std::strcmp(names + symbol.st_name, "pthread_mutex_lock") == 0) {
      auto slot =
          reinterpret_cast<void**>(info->dlpi_addr + slots[i].r_offset);
      *slot = reinterpret_cast<void*>(&failing_lock);
      *static_cast<int*>(found) = 1;
    }
  }
  return 1;
}

} // namespace

extern "C" {

// A lazy float32 array of n elements.
void* probe_make(int n, int fails) {
  auto primitive = std::make_shared<ProbeFill>(
      mx::default_stream(mx::Device::cpu), fails != 0);
  return new mx::array(
      mx::Shape{n}, mx::float32, std::move(primitive), std::vector<mx::array>{});
}

// The sum of the elements, -1 after an exception.
float probe_eval(void* handle) {
  auto& a = *static_cast<mx::array*>(handle);
  try {
    a.eval();
  } catch (const std::exception& e) {
    static thread_local std::string text;
    text = e.what();
    error = text.c_str();
    return -1;
  }
  float sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += a.data<float>()[i];
  }
  return sum;
}

const char* probe_error() {
  return error;
}

// The array's node, mx::array::ArrayDesc.
void* probe_node(void* handle) {
  return reinterpret_cast<void*>(static_cast<mx::array*>(handle)->id());
}

void probe_drop(void* handle) {
  delete static_cast<mx::array*>(handle);
}

// Remembers what slot 0 of the allocator's vtable holds now.
void probe_note_malloc() {
  void** table = *reinterpret_cast<void***>(&mx::allocator::allocator());
  std::memcpy(&real_malloc, table, sizeof(real_malloc));
}

// An array of n floats whose buffer nobody saw coming before set_data.
void* probe_bypass(int n) {
  auto* a = new mx::array(mx::Shape{n}, mx::float32, nullptr, {});
  auto buffer = real_malloc(&mx::allocator::allocator(), a->nbytes());
  bind(*a, buffer.ptr(), true);
  a->set_status(mx::array::Status::available);
  return a;
}

// A second array on the same buffer, which it doesn't own.
void* probe_weak_copy(void* handle) {
  auto& a = *static_cast<mx::array*>(handle);
  auto* copy = new mx::array(a.shape(), a.dtype(), nullptr, {});
  bind(*copy, a.buffer().ptr(), false);
  copy->set_status(mx::array::Status::available);
  return copy;
}

const void* probe_buffer(void* handle) {
  return static_cast<mx::array*>(handle)->buffer().ptr();
}

// Prepares probe_fail_malloc; 0 = MLX's malloc can't be made to fail here.
int probe_prepare_failures() {
  int found = 0;
  dl_iterate_phdr(replace_lock, &found);
  return found;
}

void probe_fail_malloc() {
  next_malloc_fails = true;
}

PyMODINIT_FUNC PyInit_probe_extension() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe_extension"};
  return PyModule_Create(&module);
}

} // extern "C"
