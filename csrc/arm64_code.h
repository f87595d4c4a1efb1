// Instructions of arm64, as far as the code of MLX's libraries for macOS is
// read.

#pragma once

#include <cstdint>
#include <cstring>

#include "image.h"

namespace mlxmem::arm64 {

constexpr size_t kInstruction = 4; // bytes

inline uint32_t instruction_at(uintptr_t address) {
  uint32_t word;
  std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof(word));
  return word;
}

inline int64_t signed_bits(uint64_t value, int n) {
  uint64_t sign = uint64_t(1) << (n - 1);
  return static_cast<int64_t>((value & (2 * sign - 1)) ^ sign) -
      static_cast<int64_t>(sign);
}

inline bool is_call(uint32_t word) { // bl
  return word >> 26 == 0b100101;
}

inline bool is_jump(uint32_t word) { // b
  return word >> 26 == 0b000101;
}

// Of a call or a jump.
inline uintptr_t target_of(uintptr_t address, uint32_t word) {
  return address + kInstruction * signed_bits(word, 26);
}

// The slot that the stub ending here jumps through: adrp x16, ldr x16, br x16.
// 0: no stub ends here. The two instructions before must be readable.
inline uintptr_t slot_of_stub(uintptr_t jump) {
  constexpr uint32_t kBrX16 = 0xD61F0200;
  if (instruction_at(jump) != kBrX16) {
    return 0;
  }
  uint32_t adrp = instruction_at(jump - 2 * kInstruction);
  uint32_t ldr = instruction_at(jump - kInstruction);
  if ((adrp & 0x9F00001F) != 0x90000010 || (ldr & 0xFFC003FF) != 0xF9400210) {
    return 0;
  }
  uint64_t pages = (adrp >> 5 & 0x7FFFF) << 2 | (adrp >> 29 & 3);
  uintptr_t page = (jump - 2 * kInstruction) & ~uintptr_t(0xFFF);
  return page + signed_bits(pages, 21) * 0x1000 + 8 * (ldr >> 10 & 0xFFF);
}

template <typename Visit>
void for_each_instruction(const Image& image, Visit&& visit) {
  for (auto& range : image.code()) {
    uintptr_t begin = (range.begin + kInstruction - 1) & ~(kInstruction - 1);
    for (auto at = begin; at + kInstruction <= range.end; at += kInstruction) {
      visit(at, instruction_at(at), range);
    }
  }
}

} // namespace mlxmem::arm64
