// The C++ classes of MLX's primitives: each that is patched gets a pair of
// functions of its own for eval_cpu and eval_gpu, which know its originals.

#pragma once

#include <atomic>
#include <cstddef>

#include "event.h"
#include "image.h"
#include "mlx_abi.h"

namespace mlxmem {

struct PrimitiveClass {
  void** vtable = nullptr; // its first virtual function
  abi::EvalFn eval_cpu = nullptr;
  abi::EvalFn eval_gpu = nullptr;
  bool allocates_on_worker = false;
  MemoryRange constants; // a name() in here is a literal: its pointer is enough
  std::atomic<uint64_t> last_name{0}; // pointer << 16 | PrimitiveId

  // Number of what name() says of this primitive.
  PrimitiveId name_of(const void* primitive);
};

// The class whose vtable lies at this address: the known one, or a new one.
// nullptr when the supply of function pairs is used up.
PrimitiveClass* primitive_class(void** vtable);

// What goes into the vtable's slots of eval_cpu and eval_gpu.
void* eval_cpu_replacement(const PrimitiveClass* primitive_class);
void* eval_gpu_replacement(const PrimitiveClass* primitive_class);

// Defined by the probes: what every replacement does.
void evaluate_primitive(
    PrimitiveClass& primitive_class,
    abi::EvalFn original,
    void* primitive,
    const void* inputs,
    void* outputs);

} // namespace mlxmem
