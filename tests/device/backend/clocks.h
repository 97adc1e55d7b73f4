#pragma once

// Vector clocks: what is known to have happened. A stream's clock counts its operations. Streams, events and
// host threads each hold, for every stream, the number of operations that are ordered before them.

#include <algorithm>
#include <array>
#include <cstdint>

#include "arena.h"

namespace simdev {

constexpr int kStreamsPerDevice = 33;  // stream 0 is the default stream, the others are a pool
constexpr int kStreams = kDevices * kStreamsPerDevice;

using Clock = std::array<uint64_t, kStreams>;

inline void merge(Clock& into, const Clock& from) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], from[i]);
}

/// Returns the operations of all streams that the calling host thread knows to be over.
const Clock& known_to_host();

/// Adds operations that the calling host thread has waited for.
void host_learns(const Clock& clock);

/// From now on, host threads learn from each other only where a mutex, a condition variable, the start or the
/// end of a thread orders them. Replaces these functions of the C library in all loaded libraries. Before the
/// first call, what one thread knows all threads know.
void separate_host_threads();

}  // namespace simdev
