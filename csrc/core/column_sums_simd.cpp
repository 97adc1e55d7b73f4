// Adds the rows of a matrix, some rows at a time, so that the sums are loaded and stored once for all of
// them.

#include "core/column_sums_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

constexpr int kRowsAtOnce = 8;

template <class E, int kRows>
void add_rows(const typename E::Type* x, int64_t columns, float* sums) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    // Two chains of additions hide the latency of an addition.
    F32 even = load(sums + c), odd = {};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) (r % 2 == 0 ? even : odd) += E::load(x + r * columns + c);
    store(sums + c, even + odd);
  }
  if (c == columns) return;
  F32 sum = load_rest<Float>(sums + c, columns - c);
  for (int r = 0; r < kRows; ++r) sum += load_rest<E>(x + r * columns + c, columns - c);
  __builtin_memcpy(sums + c, &sum, (columns - c) * sizeof(float));
}

template <class E>
void add_all(const typename E::Type* x, int64_t rows, int64_t columns, float* sums) {
  for (; rows >= kRowsAtOnce; rows -= kRowsAtOnce, x += kRowsAtOnce * columns)
    add_rows<E, kRowsAtOnce>(x, columns, sums);
  for (; rows > 0; --rows, x += columns) add_rows<E, 1>(x, columns, sums);
}

}  // namespace

extern const kernels::ColumnSumsTable column_sums;
const kernels::ColumnSumsTable column_sums{add_all<Float>, add_all<BFloat16>, add_all<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
