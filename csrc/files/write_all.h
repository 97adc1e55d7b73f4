#pragma once

#include <cstdint>

namespace shoestring::files {

/// Writes `size` bytes at a file's current position. Returns 0 or errno, and adds the number of bytes written
/// to `written`. If the memory is mapped from another file, its pages are dropped as they are written. At
/// most 8 MiB of them are then in this process's memory at a time.
int write_all(int fd, const void* data, int64_t size, int64_t& written);

}  // namespace shoestring::files
