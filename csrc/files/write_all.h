#pragma once

#include <cstdint>

namespace shoestring::files {

/// Writes `size` bytes at a file's position. Returns 0 or errno; `written` grows by what was written. Where
/// the memory is mapped from another file, its pages do not stay: no more than 8 MiB of them are in this
/// process's memory at a time.
int write_all(int fd, const void* data, int64_t size, int64_t& written);

}  // namespace shoestring::files
