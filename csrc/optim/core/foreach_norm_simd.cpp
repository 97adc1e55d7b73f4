// CPU kernels for sums of squares. Each element is read once, in its own dtype. Eight registers hold partial
// sums, which hides the latency of the additions and reduces their rounding errors. Finally, the lanes of the
// eight registers are added in double precision.

#include "optim/core/foreach_norm_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

constexpr int kSums = 8;
constexpr int64_t kLine = kSums * kLanes;

template <class E>
double squares(const void* from, int64_t count) {
  const auto* x = static_cast<const typename E::Type*>(from);
  F32 sum[kSums] = {};
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
#pragma GCC unroll 8
    for (int j = 0; j < kSums; j += 2) {
      const Pair two = E::load_pair(x + i + j * kLanes);
      sum[j] = fma(two.first, two.first, sum[j]);
      sum[j + 1] = fma(two.second, two.second, sum[j + 1]);
    }
  }
  for (; i < count; i += kLanes) {
    const F32 some = load_some<E>(x + i, count - i);
    sum[0] = fma(some, some, sum[0]);
  }
  double total = 0;
  for (int j = 0; j < kSums; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) total += sum[j][lane];
  }
  return total;
}

}  // namespace

extern const kernels::ForeachNormTable foreach_norm;
const kernels::ForeachNormTable foreach_norm{squares<Float>, squares<BFloat16>, squares<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
