#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include <shoestring/export.h>

namespace shoestring::offload::io {

/// Faults that tests inject into transfers between device, host memory and disk.
struct Disturbance {
  int64_t max_delay_us = 0;      // upper limit of a random delay before each copy, read or write
  int64_t fail_after = -1;       // number of reads and writes before one fails, once; -1: none fails
  int error = 0;                 // errno that the failing call reports
  bool short_transfers = false;  // transfers above 8 KiB do only half of the bytes at a time
  bool reserves = true;          // false: the file system reports that it cannot reserve blocks
};
SHOESTRING_API void disturb(const Disturbance& disturbance);

/// Returns the delay of the next copy, read or write; 0 outside of tests.
int64_t random_delay_us();
/// Sleeps for random_delay_us().
void delay();
/// Returns the result of a read or write that has to fail instead of running, else nothing. Called once for
/// each system call.
std::optional<ssize_t> failure();
/// Calls fallocate unless the disturbance forbids it. Returns 0 or an errno.
int reserve(int fd, int64_t offset, int64_t size);
/// Returns the result of a system call, reduced if the disturbance asks for short transfers.
ssize_t shortened(ssize_t result, int64_t asked);

}  // namespace shoestring::offload::io
