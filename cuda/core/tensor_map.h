#pragma once

// Host code for TMA copies (tma_load in hopper.h): a tensor map describes a tensor in global memory, and the
// box of elements that one copy loads.

#include <cstdint>

#include "cuda/core/hopper.h"

#if defined(__CUDACC__)
#include <cudaTypedefs.h>
#endif

namespace shoestring::cuda {

/// Encodes the tensor map of a 16-bit tensor with `rank` = 3 to 5 dimensions, innermost first. bf16 and fp16
/// need the same map. `sizes` are in elements. `strides` are in bytes and leave out the innermost dimension.
/// The strides and the address must be multiples of 16. `box` has at most 64 elements in the innermost
/// dimension and 256 in each other one. Returns an error text or null.
inline const char* encode_tensor_map(TensorMap* map, const void* address, int rank, const int64_t* sizes,
                                     const int64_t* strides, const int* box) {
#if defined(__CUDACC__)
  // cuTensorMapEncodeTiled is looked up in the driver at run time instead of being linked, so that the
  // library also loads on a machine without a driver.
  static const auto encode = []() -> PFN_cuTensorMapEncodeTiled_v12000 {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
               : nullptr;
  }();
  if (encode == nullptr)
    return "this driver has no cuTensorMapEncodeTiled; expected one for CUDA 12.0 or later";
  cuuint64_t size[5] = {}, stride[4] = {};
  cuuint32_t extent[5] = {};
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank; ++i) {
    size[i] = static_cast<cuuint64_t>(sizes[i]);
    extent[i] = static_cast<cuuint32_t>(box[i]);
    if (i > 0) stride[i - 1] = static_cast<cuuint64_t>(strides[i - 1]);
  }
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(address), size, stride, extent,
             every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the tensor's sizes or strides";
#else
  return simt::encode_tensor_map(map, address, rank, 2, sizes, strides, box);
#endif
}

}  // namespace shoestring::cuda
