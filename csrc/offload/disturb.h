#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include <shoestring/core/export.h>

namespace shoestring::offload::io {

/// Faults that tests inject into transfers between device, host memory and disk.
struct Disturbance {
  int64_t max_delay_us = 0;  // upper limit in microseconds of a random delay before each copy, read or write
  // number of reads and writes that succeed before exactly one fails; -1: none fails
  int64_t fail_after = -1;
  int error = 0;  // the errno that the failing read or write reports
  // if true, a read or write of more than 8 KiB transfers only half of the bytes
  bool short_transfers = false;
  bool reserves = true;  // if false, reserve() fails as if the file system could not reserve blocks
};
/// Sets the faults of all later transfers.
SHOESTRING_API void disturb(const Disturbance& disturbance);

/// Returns the random delay of the next copy, read or write in microseconds; 0 outside of tests.
int64_t random_delay_us();
/// Sleeps for the delay that random_delay_us() returns.
void delay();
/// If tests want the next read or write to fail, returns the result to report instead of running it;
/// otherwise nullopt. Must be called once for each system call.
std::optional<ssize_t> failure();
/// Reserves disk blocks with fallocate, unless Disturbance::reserves forbids it. Returns 0 or an errno.
int reserve(int fd, int64_t offset, int64_t size);
/// Returns the result to report for a read or write of `asked` bytes: `result`, or about half of it if tests
/// want short transfers.
ssize_t shortened(ssize_t result, int64_t asked);

}  // namespace shoestring::offload::io
