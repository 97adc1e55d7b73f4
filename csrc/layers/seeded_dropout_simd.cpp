// Seeded dropout on the CPU. The mask depends only on the seed and the index of the element, so backward
// recomputes it instead of saving it.

#include "layers/seeded_dropout_table.h"

#include "core/element_simd.h"
#include "core/philox_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Dropout;
using kernels::kDropoutBlock;
static_assert(kDropoutBlock == kernels::kRandomBlock, "random_block makes the bits of a block");

template <class E, class T>
void drop(const T* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule, T* out) {
  uint16_t bits[kDropoutBlock];
  T last[kDropoutBlock];
  const I32 threshold = I32{} + static_cast<int32_t>(rule.threshold);
  for (int64_t i = 0; i < count; i += kDropoutBlock) {
    random_block(seed, 0, 0, (begin + i) / kDropoutBlock, bits);
    const bool whole = count - i >= kDropoutBlock;
    if (!whole) __builtin_memcpy(last, x + i, (count - i) * sizeof(T));
    const T* from = whole ? x + i : last;
    T* to = whole ? out + i : last;
    for (int64_t j = 0; j < kDropoutBlock; j += 2 * kLanes) {
      F32 kept[2];
      for (int k = 0; k < 2; ++k) {
        const I32 drawn = __builtin_convertvector(load_as<U16>(bits + j + k * kLanes), I32);
        kept[k] = drawn < threshold ? F32{} : E::load(from + j + k * kLanes) * rule.scale;
      }
      E::store(to + j, kept[0], kept[1]);
    }
    if (!whole) __builtin_memcpy(out + i, last, (count - i) * sizeof(T));
  }
}

}  // namespace

extern const kernels::SeededDropoutTable seeded_dropout;
const kernels::SeededDropoutTable seeded_dropout{drop<Float, float>, drop<BFloat16, uint16_t>,
                                                 drop<Half, uint16_t>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
