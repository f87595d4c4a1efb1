// The checks of mlx_abi.h's facts on the MLX of this process, some of which
// call its functions.

#pragma once

#include <vector>

#include "mlx_core.h"

namespace mlxmem {

// Finds the core among the loaded images and checks every fact, without
// changing a word of it; sets what originals and mlx_counters take from there.
// Throws AttachError, which names the fact that does not hold.
MlxCore check_mlx_core(const std::vector<Image>& images);

} // namespace mlxmem
