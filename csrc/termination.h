// SIGTERM and SIGHUP as a call that returns: for writing a dump before the
// process dies.

#pragma once

#include "hook_api.h"

// From now on SIGTERM and SIGHUP let mlxmem_wait_for_termination() return
// instead of killing this process: the first of them, and a second SIGTERM; a
// third one kills it. Python's own table of handlers does not show it, and its
// signal.signal() replaces it. A forked child dies as always. A signal that
// does not kill anyway is left as it is; returns 0, with nothing changed, where
// none does.
MLXMEM_API int mlxmem_catch_termination(void);
// Returns the signal that came first.
MLXMEM_API int mlxmem_wait_for_termination(void);
// Let them kill again, unless somebody else handles them by now.
MLXMEM_API void mlxmem_release_termination(void);
