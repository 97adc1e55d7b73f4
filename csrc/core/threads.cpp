#include "core/threads.h"

#include <cstdlib>
#include <string>

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

}  // namespace shoestring
