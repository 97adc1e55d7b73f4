// Tests how many threads a piece of work gets.

#include "core/threads.h"

#include <ATen/Parallel.h>

#include "catch.h"

using shoestring::bytes_per_thread;
using shoestring::row_grain;
using shoestring::threads_for;

TEST_CASE("small work stays on one thread, and large work takes all threads", "[threads]") {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 7, 64}) {
    at::set_num_threads(threads);
    CAPTURE(threads);
    CHECK(threads_for(0) == 1);
    CHECK(threads_for(static_cast<double>(bytes_per_thread())) == 1);
    CHECK(threads_for(1e18) == threads);
    // between the two, each thread gets at least the least amount of work
    const double work = 2.0 * 3.5 * static_cast<double>(bytes_per_thread());
    CHECK(threads_for(work) == std::min(3, threads));
  }
  at::set_num_threads(before);
  CHECK(row_grain(0) == bytes_per_thread());
  CHECK(row_grain(bytes_per_thread()) == 1);
  CHECK(row_grain(bytes_per_thread() * 4) == 1);
}
