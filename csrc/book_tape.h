// Books what the allocator's tape says. With the books locked; these throw
// std::bad_alloc.

#pragma once

#include "books.h"

namespace mlxmem {

// The session begins: the allocator as it is, held still meanwhile.
void start_tape(Books& books);

// What was noted so far, up to what its thread has yet to fill in.
void book_tape(Books& books);

// All of it: waits for such a thread up to two seconds, and leaves out what it
// did not fill in. Then the totals must be MLX's; what they lack is
// unexplained.
void book_whole_tape(Books& books);

} // namespace mlxmem
