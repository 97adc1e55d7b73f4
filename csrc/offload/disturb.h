#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include <shoestring/export.h>

namespace shoestring::offload::io {

/// For tests of memory that is on its way to a host's memory or a disk and back: what happens to each
/// transfer.
struct Disturbance {
  int64_t max_delay_us = 0;      // a random time before each copy, read or write
  int64_t fail_after = -1;       // reads and writes until one fails, once; -1: none
  int error = 0;                 // how: an errno
  bool short_transfers = false;  // of more than 8 KiB, only half is done at a time
  bool reserves = true;          // whether the file system can reserve blocks
};
SHOESTRING_API void disturb(const Disturbance& disturbance);

/// The time that a copy, read or write has to wait; 0 but in tests.
int64_t random_delay_us();
/// Waits for so long.
void delay();
/// The result of a read or write that has to fail, in the place of doing it; asked once for each system call.
std::optional<ssize_t> failure();
/// fallocate, as the disturbance lets it: 0 or an errno.
int reserve(int fd, int64_t offset, int64_t size);
/// A system call's result as the disturbance wants it.
ssize_t shortened(ssize_t result, int64_t asked);

}  // namespace shoestring::offload::io
