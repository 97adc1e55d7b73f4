#pragma once

#include <cstdint>

namespace simdev {

/// Multiplies x[0 .. n) by *factor. Returns an error text or null.
const char* launch_scale(float* x, int64_t n, const float* factor, void* stream);

}  // namespace simdev
