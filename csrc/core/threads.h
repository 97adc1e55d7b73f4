#pragma once

#include <algorithm>
#include <cstdint>

#include <shoestring/core/export.h>

namespace shoestring {

/// Returns the number of bytes that a thread must read and write so that it pays to wake it. A loop over less
/// memory runs on one thread. Threads of OpenMP spin between parallel regions unless OMP_WAIT_POLICY is
/// "passive" or GOMP_SPINCOUNT is 0: then a thread takes about 60 µs to wake, else about 3 µs.
SHOESTRING_API int64_t bytes_per_thread();

/// Returns the `grain_size` of at::parallel_for for rows of which each reads and writes `bytes`. A loop that
/// computes for longer than its memory takes passes as many bytes as one core copies in that time, about 30
/// in a nanosecond. Results of a loop must not depend on the grain.
inline int64_t row_grain(int64_t bytes) {
  return std::max<int64_t>(1, bytes_per_thread() / std::max<int64_t>(1, bytes));
}

/// Returns how many threads matrix products of so many multiplications are worth, at most
/// at::get_num_threads(), and one within at::parallel_for.
SHOESTRING_API int64_t threads_for(double multiplications);

}  // namespace shoestring
