#include "core/capability.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

namespace shoestring::cpu {
namespace {

Capability best() {
  for (auto candidate : {Capability::kAvx512, Capability::kAvx2}) {
    if (supports(candidate)) return candidate;
  }
  return Capability::kPlain;
}

Capability initial() {
  const char* wanted = std::getenv("SHOESTRING_CPU");
  if (wanted == nullptr || *wanted == '\0') return best();
  for (auto candidate : {Capability::kPlain, Capability::kAvx2, Capability::kAvx512}) {
    if (std::string(wanted) != name(candidate)) continue;
    TORCH_CHECK(supports(candidate), "shoestring: SHOESTRING_CPU=", wanted,
                ", but this machine does not have it; the best here is ", name(best()));
    return candidate;
  }
  TORCH_CHECK(false, "shoestring: SHOESTRING_CPU: expected plain, avx2 or avx512, received '", wanted, "'");
}

std::atomic<Capability>& current() {
  static std::atomic<Capability> value{initial()};
  return value;
}

}  // namespace

Capability capability() { return current().load(std::memory_order_relaxed); }

bool supports(Capability capability) {
  if (capability == Capability::kPlain) return true;
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  if (capability == Capability::kAvx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool set_capability(Capability capability) {
  if (!supports(capability)) return false;
  current().store(capability, std::memory_order_relaxed);
  return true;
}

const char* name(Capability capability) {
  switch (capability) {
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    default:
      return "plain";
  }
}

}  // namespace shoestring::cpu
