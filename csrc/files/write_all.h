#pragma once

#include <cstdint>

namespace shoestring::files {

/// Writes `size` bytes to an open file at its current position. Returns 0 or errno, and adds the number of
/// bytes written to `written`. If `data` is mapped from another file, its pages are dropped from memory once
/// they are written. At most 8 MiB of them are thus in memory at a time.
int write_all(int fd, const void* data, int64_t size, int64_t& written);

}  // namespace shoestring::files
