// Run-time type information as the Itanium C++ ABI lays it out: enough to tell
// which class a vtable is of, and whether it derives from another.

#pragma once

#include <cstring>
#include <typeinfo>

namespace mlxmem {

struct TypeInfo {
  void* kind; // which class of type_info this is
  const char* name;
  const TypeInfo* base; // of a class with one base
};

// Classes of our own whose type information shows what the two kinds look like.
struct OneBase {
  virtual ~OneBase() = default;
};
struct Derived : OneBase {};

inline bool has_one_base(const TypeInfo* type) {
  static void* const kind = *reinterpret_cast<void* const*>(&typeid(Derived));
  return type->kind == kind;
}

inline bool is_class(const TypeInfo* type) {
  static void* const kind = *reinterpret_cast<void* const*>(&typeid(OneBase));
  return type->kind == kind || has_one_base(type);
}

inline bool derives_from(const TypeInfo* type, const TypeInfo* base) {
  for (int depth = 0; type && depth < 16; ++depth) {
    if (type == base || std::strcmp(type->name, base->name) == 0) {
      return true;
    }
    if (!has_one_base(type)) {
      return false;
    }
    type = type->base;
  }
  return false;
}

// The vtable's first function follows the offset to the top and the type.
inline const TypeInfo* type_of_vtable(void* const* vtable) {
  return static_cast<const TypeInfo*>(vtable[-1]);
}

} // namespace mlxmem
