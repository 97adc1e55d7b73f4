#include "core/capability.h"

#include <atomic>
#include <cstdlib>
#include <string>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <c10/util/Exception.h>

namespace shoestring::cpu {
namespace {

#if defined(__x86_64__)
// Linux gives the registers of AMX to a process that asks for them. Returns whether it does.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

Capability best() {
  for (auto candidate : {Capability::kAmx, Capability::kAvx512, Capability::kAvx2}) {
    if (supports(candidate)) return candidate;
  }
  return Capability::kPlain;
}

Capability initial() {
  const char* requested = std::getenv("SHOESTRING_CPU");
  if (requested == nullptr || *requested == '\0') return best();
  for (auto candidate : {Capability::kPlain, Capability::kAvx2, Capability::kAvx512, Capability::kAmx}) {
    if (std::string(requested) != name(candidate)) continue;
    TORCH_CHECK(supports(candidate), "shoestring: SHOESTRING_CPU=", requested,
                ", but this machine does not have it; the best here is ", name(best()));
    return candidate;
  }
  TORCH_CHECK(false, "shoestring: SHOESTRING_CPU: expected plain, avx2, avx512 or amx, received '", requested,
              "'");
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
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (capability == Capability::kAvx512) return avx512;
  return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-bf16") && may_use_tiles();
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
    case Capability::kAmx:
      return "amx";
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    default:
      return "plain";
  }
}

}  // namespace shoestring::cpu
