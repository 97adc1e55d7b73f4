#pragma once

#include <algorithm>
#include <cstdint>

namespace shoestring {

/// Returns the number of bytes that a thread must read and write so that it pays to wake it. A loop over less
/// memory runs on one thread. Threads of OpenMP spin between parallel regions unless OMP_WAIT_POLICY is
/// "passive" or GOMP_SPINCOUNT is 0: then a thread takes about 60 µs to wake, else about 3 µs.
int64_t bytes_per_thread();

/// Returns the `grain_size` of at::parallel_for for rows of which each reads and writes `bytes`. Results of a
/// loop must not depend on it.
inline int64_t row_grain(int64_t bytes) {
  return std::max<int64_t>(1, bytes_per_thread() / std::max<int64_t>(1, bytes));
}

}  // namespace shoestring
