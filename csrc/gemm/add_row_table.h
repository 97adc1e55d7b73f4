#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// CPU kernel that adds scale * (from + offset) to the row `to`. offset may be null.
struct AddRowTable {
  void (*add)(float* to, const float* from, const float* offset, float scale, int64_t count);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::AddRowTable, add_row)
