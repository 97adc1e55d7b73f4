#include "core/threads.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include <ATen/Parallel.h>
#include <strings.h>

namespace shoestring {
namespace {

bool threads_sleep() {
  const char *policy = std::getenv("OMP_WAIT_POLICY"), *spins = std::getenv("GOMP_SPINCOUNT");
  if (spins != nullptr) return std::string(spins) == "0";
  return policy != nullptr && strcasecmp(policy, "passive") == 0;
}

}  // namespace

int64_t bytes_per_thread() {
  // At the 30 GB/s with which one core reads and writes its L2 cache, the time of about three wake-ups.
  static const int64_t bytes = threads_sleep() ? int64_t{5} << 20 : int64_t{384} << 10;
  return bytes;
}

int64_t threads_for(double multiplications) {
  if (at::in_parallel_region()) return 1;
  // A core does at least two multiplications in the time in which it copies a byte.
  const double worth = multiplications / (2 * static_cast<double>(bytes_per_thread()));
  return std::max<int64_t>(1, static_cast<int64_t>(std::min<double>(worth, at::get_num_threads())));
}

}  // namespace shoestring
