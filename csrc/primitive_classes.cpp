#include "primitive_classes.h"

#include <array>
#include <utility>

#include "primitive_names.h"

namespace mlxmem {

namespace {

// MLX 0.32.4 has 137 classes; the rest is for extensions.
constexpr size_t kMaxClasses = 512;

PrimitiveClass classes[kMaxClasses];
size_t n_classes = 0;

template <size_t I>
void eval_cpu(void* primitive, const void* inputs, void* outputs) {
  evaluate_primitive(
      classes[I], classes[I].eval_cpu, primitive, inputs, outputs);
}

template <size_t I>
void eval_gpu(void* primitive, const void* inputs, void* outputs) {
  evaluate_primitive(
      classes[I], classes[I].eval_gpu, primitive, inputs, outputs);
}

struct EvalPair {
  abi::EvalFn cpu;
  abi::EvalFn gpu;
};

template <size_t... I>
constexpr std::array<EvalPair, sizeof...(I)> make_pairs(
    std::index_sequence<I...>) {
  return {{{eval_cpu<I>, eval_gpu<I>}...}};
}

constexpr auto pairs = make_pairs(std::make_index_sequence<kMaxClasses>());

} // namespace

PrimitiveId PrimitiveClass::name_of(const void* primitive) {
  auto name = reinterpret_cast<abi::NameFn>(vtable[abi::kName])(primitive);
  auto pointer = reinterpret_cast<uint64_t>(name);
  uint64_t last = last_name.load(std::memory_order_relaxed);
  if (last >> 16 == pointer) {
    return static_cast<PrimitiveId>(last);
  }
  PrimitiveId id = intern_primitive_name(name);
  if (constants.contains(name)) {
    last_name.store(pointer << 16 | id, std::memory_order_relaxed);
  }
  return id;
}

PrimitiveClass* primitive_class(void** vtable) {
  for (size_t i = 0; i < n_classes; ++i) {
    if (classes[i].vtable == vtable) {
      return &classes[i];
    }
  }
  if (n_classes == kMaxClasses) {
    return nullptr;
  }
  auto& added = classes[n_classes++];
  added.vtable = vtable;
  return &added;
}

void* eval_cpu_replacement(const PrimitiveClass* primitive_class) {
  return reinterpret_cast<void*>(pairs[primitive_class - classes].cpu);
}

void* eval_gpu_replacement(const PrimitiveClass* primitive_class) {
  return reinterpret_cast<void*>(pairs[primitive_class - classes].gpu);
}

} // namespace mlxmem
