#pragma once

// Allocates CPU tensors for training: reuses freed memory, in huge pages, and counts peaks.

#include <cstdint>
#include <optional>

#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring::host_allocator {

struct SHOESTRING_API HostAllocatorOptions {
  /// The most bytes that CPU tensors may hold. An allocation beyond it throws c10::OutOfMemoryError. By
  /// default the system decides.
  TORCH_ARG(std::optional<int64_t>, limit) = std::nullopt;
};

/// Bytes and counts of the tensors that this allocator made.
struct SHOESTRING_API HostAllocatorStats {
  /// Bytes of the tensors' storages now, and the maximum since the start or since reset_peaks(). Exact.
  int64_t allocated = 0, peak_allocated = 0;
  /// Bytes that the process holds for storages now, and the maximum: storages, free memory that is kept for
  /// reuse, and rounding.
  int64_t held = 0, peak_held = 0;
  /// Allocations so far.
  int64_t allocations = 0;
  /// Bytes of huge pages that were taken from the system so far, and returned to it.
  int64_t taken = 0, returned = 0;
};

/// Makes this the allocator of CPU tensors, from now on and in all threads. Tensors that exist stay valid. A
/// second call only changes the options. Throws c10::Error on an invalid limit, on a system other than Linux,
/// or if another allocator with a priority above 0 is installed. Example:
///
///     shoestring::host_allocator::enable();
///     train(model);
///     std::cout << shoestring::host_allocator::stats().peak_allocated << "\n";
SHOESTRING_API void enable(const HostAllocatorOptions& options = {});
/// Reinstalls the allocator that was in use before enable(), and returns free memory to the system. Tensors
/// of this allocator stay valid, and their memory is freed when they are destroyed.
SHOESTRING_API void disable();
/// Tells whether this is the allocator of CPU tensors.
SHOESTRING_API bool is_enabled();

SHOESTRING_API HostAllocatorStats stats();
/// Starts both maxima again at the present values.
SHOESTRING_API void reset_peaks();
/// Returns free memory to the system, also that of the C library. Returns the number of bytes of huge pages
/// that were returned.
SHOESTRING_API int64_t empty_cache();

}  // namespace shoestring::host_allocator
