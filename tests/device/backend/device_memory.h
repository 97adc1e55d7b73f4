#pragma once

// The allocator of device memory. As PyTorch's CUDA allocator does, it hands out freed memory again without a
// wait, since the stream that allocated it runs its operations in order.

#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "detector.h"

namespace simdev {

c10::Allocator* device_allocator();

/// Checks an access to a block of device memory. The caller holds records().
void check_device_access(const Range& range, const Position& position, const Clock& clock, const char* name);

/// Keeps a block from reuse, once it is freed, until a stream has passed what it has at that time.
void record_stream(const c10::DataPtr& data, int stream);

struct MemoryCounts {
  int64_t allocations = 0;  // calls that returned memory
  int64_t fresh = 0;        // calls that found no freed memory of their size
  int64_t bytes = 0, peak_bytes = 0;
};
MemoryCounts memory_counts(int device);
void reset_peak_memory(int device);

}  // namespace simdev
