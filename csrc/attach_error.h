#pragma once

#include <stdexcept>

namespace mlxmem {

// A fact about the running MLX that does not hold. what() names it.
class AttachError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

} // namespace mlxmem
