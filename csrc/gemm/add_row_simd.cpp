#include "gemm/add_row_table.h"

#include "core/row_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

void add(float* to, const float* from, const float* offset, float scale, int64_t count) {
  const F32 factor = splat(scale);
  sweep(0, count, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F32 x = get(from + i, n, 0);
    if (offset != nullptr) x += get(offset + i, n, 0);
    put(to + i, fma(factor, x, get(to + i, n, 0)), n);
  });
}

}  // namespace

extern const kernels::AddRowTable add_row;
const kernels::AddRowTable add_row{add};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
