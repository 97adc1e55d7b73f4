#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Functions that write out (rows, columns) = gain * from for one gain per column. Rows of `from` are
/// contiguous and start `stride` elements apart; `out` is contiguous, fp32 or bf16.
struct ScaleColumnsTable {
  template <class From, class To>
  using Function = void (*)(const From* from, int64_t stride, const float* gain, int64_t rows,
                            int64_t columns, To* out);
  // The name tells the type of `from`; `out` is fp32.
  Function<float, float> float_to_float;
  Function<uint16_t, float> bf16_to_float, fp16_to_float;
  // `out` is bf16.
  Function<float, uint16_t> float_to_bf16;
  Function<uint16_t, uint16_t> bf16_to_bf16, fp16_to_bf16;
  // The same functions with bf16 instructions. They may be called if gemm::multiplies_bf16(), and are null
  // pointers in builds without AVX-512.
  Function<float, uint16_t> float_by_units;
  Function<uint16_t, uint16_t> bf16_by_units, fp16_by_units;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::ScaleColumnsTable, scale_columns)
