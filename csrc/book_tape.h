// Books what the allocator's tape says. With the books locked; these throw
// std::bad_alloc.

#pragma once

#include "books.h"

namespace mlxmem {

// The session begins: the allocator as it is, held still meanwhile.
void start_tape(Books& books);

// What was noted so far, up to what its thread has yet to fill in.
void book_tape(Books& books);

// The same, and waits a moment for such a thread; then the totals must be
// MLX's.
void book_whole_tape(Books& books);

} // namespace mlxmem
