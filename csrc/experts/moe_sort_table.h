#pragma once

#include <cstdint>

namespace shoestring::kernels {

/// The CUDA kernels of moe_sort. A warp counts and places the slots of a part of `each` slots, a multiple of
/// 32. All pointers are on the device. A slot whose expert is not in [0, experts) has no expert. Each
/// function returns an error message or null.
struct MoeSortCuda {
  // Counts the slots of each part, (parts, experts + 1). The last count is that of slots without an expert.
  const char* (*count)(const int64_t* index, int64_t slots, int64_t experts, int64_t each, int64_t parts,
                       int64_t* counts, void* stream);
  // Replaces each count by the place of the part's first slot of the expert, and writes the offsets.
  const char* (*scan)(int64_t* counts, int64_t experts, int64_t parts, int64_t* offsets, void* stream);
  const char* (*place)(const int64_t* index, int64_t slots, int64_t experts, int64_t each, int64_t parts,
                       int64_t* places, int64_t* order, int64_t* inverse, void* stream);
  const char* (*invert)(const int64_t* order, int64_t slots, int64_t* inverse, void* stream);
};

}  // namespace shoestring::kernels
