#pragma once

// A stand-in for the CUDA driver. It hands out a cuTensorMapEncodeTiled that records its parameters instead
// of encoding a tensor map. The library and CuTe both look this function up in the driver at run time.

#include <cstdint>
#include <vector>

namespace twins {

/// The parameters of the last call of cuTensorMapEncodeTiled, as numbers: type, rank, address, and then for
/// each dimension its size, stride in bytes (0 for the innermost one), box and element stride. The last three
/// numbers are interleave, swizzle and fill. The type is 16 for both bf16 and fp16, since a copy treats them
/// alike. L2 promotion is left out: it does not change what a copy writes.
std::vector<int64_t> recorded_map();

/// Encodes a tensor map with the GPU's branch of cuda/core/tensor_map.h. Returns an error text or null.
const char* encode_for_gpu(const void* address, int rank, const int64_t* sizes, const int64_t* strides,
                           const int* box);

}  // namespace twins
