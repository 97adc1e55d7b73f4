#pragma once

namespace simt_tests {

/// Launches a kernel with kStaticBytes bytes of static shared memory and `dynamic_bytes` of dynamic shared
/// memory. Returns an error text or null.
constexpr int kStaticBytes = 512 * 4 + 16;
const char* take_shared(int dynamic_bytes);

}  // namespace simt_tests
