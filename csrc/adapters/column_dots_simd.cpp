// Computes the sum of a * (b - offset) over the rows of each column; lora_linear needs it for the gradient of
// the gain. Both matrices are read once, four vector registers of columns at a time. A register adds the
// products of at most kRows rows before its sum is added to a total. This keeps the rounding error as small
// as in a sum of kRows terms.

#include "adapters/column_dots_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

constexpr int kWide = 4;  // number of vector registers that hold the columns computed together
constexpr int64_t kLine = kWide * kLanes;
constexpr int64_t kRows = 128;

template <class E>
void dots(const typename E::Type* a, const typename E::Type* b, const float* offset, int64_t rows,
          int64_t stride, int64_t begin, int64_t end, float* sums) {
  for (int64_t c = begin; c < end; c += kLine) {
    const int64_t n = end - c < kLine ? end - c : kLine;
    F32 total[kWide] = {}, away[kWide] = {};
    for (int j = 0; j < kWide && offset != nullptr; ++j)
      away[j] = load_some<Float>(offset + c + j * kLanes, n - j * kLanes);
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t last = first + kRows < rows ? first + kRows : rows;
      F32 sum[kWide] = {};
      if (n == kLine) {
        for (int64_t r = first; r < last; ++r) {
#pragma GCC unroll 4
          for (int j = 0; j < kWide; ++j) {
            const int64_t i = r * stride + c + j * kLanes;
            sum[j] = fma(E::load(a + i), E::load(b + i) - away[j], sum[j]);
          }
        }
      } else {
        for (int64_t r = first; r < last; ++r) {
          for (int j = 0; j * kLanes < n; ++j) {
            const int64_t i = r * stride + c + j * kLanes, left = n - j * kLanes;
            sum[j] = fma(load_some<E>(a + i, left), load_some<E>(b + i, left) - away[j], sum[j]);
          }
        }
      }
      for (int j = 0; j < kWide; ++j) total[j] += sum[j];
    }
    __builtin_memcpy(sums + c, total, n * sizeof(float));
  }
}

}  // namespace

extern const kernels::ColumnDotsTable column_dots;
const kernels::ColumnDotsTable column_dots{dots<Float>, dots<BFloat16>, dots<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
