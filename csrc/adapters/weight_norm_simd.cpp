// Computes the norms of the rows of an adapted weight. The squares of a row are summed in four vector
// registers. A register adds at most 128 squares before its sum is added to a total. This keeps the rounding
// error small in long rows. Rows are prefetched two ahead, because the CPU's own prefetcher restarts in each
// page.

#include "adapters/weight_norm_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

constexpr int64_t kWeightNormColumns = 128 * 4 * kLanes;

template <class E>
void squares(const typename E::Type* rows, int64_t stride, int64_t count, int64_t columns, float* sums) {
  for (int64_t r = 0; r < count; ++r) {
    const auto* row = rows + r * stride;
    F32 total{};
    for (int64_t first = 0; first < columns; first += kWeightNormColumns) {
      const int64_t last = columns - first < kWeightNormColumns ? columns : first + kWeightNormColumns;
      F32 sum[4] = {};
      int64_t c = first;
      for (; c + 4 * kLanes <= last; c += 4 * kLanes) {
        for (int64_t i = 0; i < 4 * kLanes; i += 64 / static_cast<int64_t>(sizeof *row))
          __builtin_prefetch(address(row, 2 * stride + c + i));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const F32 x = E::load(row + c + j * kLanes);
          sum[j] = fma(x, x, sum[j]);
        }
      }
      for (; c < last; c += kLanes) {
        const F32 x = load_some<E>(row + c, last - c);
        sum[0] = fma(x, x, sum[0]);
      }
      total += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    sums[r] = horizontal_sum(total);
  }
}

bool norms(const float* squares, const float* products, int64_t parts, int64_t stride, const float* b,
           const float* gram, int64_t rank, float s, int64_t count, float* norms) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i, products += stride, b += rank) {
    F32 total{};
    for (int64_t j = 0; j < rank; j += kLanes) {
      const int64_t ranks_left = rank - j;
      // The parts of A w are added from the smallest to the largest.
      F32 mixed{};
      for (int64_t part = parts - 1; part >= 0; --part)
        mixed += load_some<Float>(products + part * rank + j, ranks_left);
      for (int64_t k = 0; k < rank; ++k)
        mixed = fma(splat(b[k]), load_some<Float>(gram + k * rank + j, ranks_left), mixed);
      total = fma(mixed, load_some<Float>(b + j, ranks_left), total);
    }
    const float square = squares[i] + 2 * s * horizontal_sum(total);
    finite = finite && square - square == 0;
    norms[i] = __builtin_sqrtf(square < 0 ? 0 : square);
  }
  return finite;
}

}  // namespace

extern const kernels::WeightNormTable weight_norm;
const kernels::WeightNormTable weight_norm{squares<Float>, squares<BFloat16>, squares<Half>, norms};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
