// What may be done with pages of memory, asked from the operating system. One
// implementation file per platform; a test may link its own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mlxmem {

enum PageAccess { kPageRead = 1, kPageWrite = 2, kPageExecute = 4 };

size_t page_size(); // bytes

// The protection of each address's page, a sum of PageAccess; -1 where nothing
// is mapped. Throws AttachError where the system does not tell.
std::vector<int> page_protections(const std::vector<uintptr_t>& addresses);

// Sets the protection of whole pages; returns 0 or the system's error number.
// A page that becomes writable becomes this process's own. Opens no file.
int protect_pages(uintptr_t begin, uintptr_t end, int protection);
std::string protection_error(int number);

} // namespace mlxmem
