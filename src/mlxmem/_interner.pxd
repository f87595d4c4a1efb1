from libc.stdint cimport uint32_t

ctypedef uint32_t (*CaptureFunc)() noexcept nogil

# Callable on any thread, with or without the GIL; 0 means no traceback.
cdef uint32_t capture() noexcept nogil
