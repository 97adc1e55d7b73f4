// Computes the sum of a * (b - offset) over the rows of each column; lora_linear needs it for the gradient of
// the gain. Both matrices are read once, in runs of kRun columns of a few rows, while the next rows are
// prefetched. The sums of kRows rows are kept in the first-level cache before they are added to a total. This
// keeps the rounding error as small as in a sum of kRows terms.

#include "adapters/column_dots_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

constexpr int64_t kRun = 2048;
constexpr int64_t kRows = 128;
constexpr int kRowsTogether = 4;  // number of rows that are added to a sum while it is in a register

// Adds the products of `count` rows and `n` columns to `sums`, and prefetches the next kRowsTogether rows.
template <class E>
void add_rows(const typename E::Type* a, const typename E::Type* b, const float* offset, int64_t count,
              int64_t stride, int64_t n, float* sums) {
  const auto add = [&](int64_t c, auto load_row) __attribute__((always_inline)) {
    const int64_t width = n - c;
    if (c % (64 / static_cast<int64_t>(sizeof *a)) == 0) {
      for (int64_t r = kRowsTogether; r < kRowsTogether + count; ++r) {
        __builtin_prefetch(address(a, r * stride + c));
        __builtin_prefetch(address(b, r * stride + c));
      }
    }
    const F32 away = offset == nullptr ? F32{} : load_some<Float>(offset + c, width);
    F32 sum = load(sums + c);
    for (int64_t r = 0; r < count; ++r) {
      sum = fma(load_row(a + r * stride + c, width), load_row(b + r * stride + c, width) - away, sum);
    }
    store(sums + c, sum);
  };
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes)
    add(c, [](const auto* p, int64_t) __attribute__((always_inline)) { return E::load(p); });
  if (c < n) {
    add(c, [](const auto* p, int64_t left) __attribute__((always_inline)) { return load_some<E>(p, left); });
  }
}

template <class E>
void dots(const typename E::Type* a, const typename E::Type* b, const float* offset, int64_t rows,
          int64_t stride, int64_t begin, int64_t end, float* sums) {
  for (int64_t c = begin; c < end; c += kRun) {
    const int64_t n = end - c < kRun ? end - c : kRun;
    const float* away = offset == nullptr ? nullptr : offset + c;
    alignas(kBytes) float total[kRun] = {};
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t last = first + kRows < rows ? first + kRows : rows;
      alignas(kBytes) float sum[kRun] = {};
      for (int64_t r = first; r < last; r += kRowsTogether) {
        const int64_t i = r * stride + c;
        if (last - r >= kRowsTogether) {
          add_rows<E>(a + i, b + i, away, kRowsTogether, stride, n, sum);
        } else {
          add_rows<E>(a + i, b + i, away, last - r, stride, n, sum);
        }
      }
      for (int64_t k = 0; k < n; k += kLanes) store(total + k, load(total + k) + load(sum + k));
    }
    __builtin_memcpy(sums + c, total, n * sizeof(float));
  }
}

}  // namespace

extern const kernels::ColumnDotsTable column_dots;
const kernels::ColumnDotsTable column_dots{dots<Float>, dots<BFloat16>, dots<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
