// Which operating system's MLX is attached to. What differs is the format of
// the images, the C++ library, and by which words nodes are seen.

#pragma once

// A test on Linux defines it to run the code for macOS on mapped images.
#if !defined(MLXMEM_MACOS)
#if defined(__APPLE__)
#define MLXMEM_MACOS 1
#else
#define MLXMEM_MACOS 0
#endif
#endif
