// SIGTERM as a call that returns: for writing a dump before the process dies.

#pragma once

#include "hook_api.h"

// From now on SIGTERM lets mlxmem_wait_for_termination() return instead of
// killing this process; a second one kills it. Python's own table of handlers
// does not show it, and its signal.signal() replaces it. A forked child dies as
// always. Returns 0, with nothing changed, where SIGTERM does not kill anyway.
MLXMEM_API int mlxmem_catch_termination(void);
MLXMEM_API void mlxmem_wait_for_termination(void);
// Let SIGTERM kill again, unless somebody else handles it by now.
MLXMEM_API void mlxmem_release_termination(void);
