#include "driver.h"

#include <cstring>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// The header's branch for GPUs, compiled by g++. CUDA's own headers are included above, as host code. No
// function with inline PTX is called, so none reaches the assembler.
size_t __cvta_generic_to_shared(const void*);
size_t __cvta_generic_to_global(const void*);
#undef __device__
#define __device__
#define __CUDACC__
#include "cuda/core/tensor_map.h"
#undef __CUDACC__

namespace {

std::vector<int64_t> recorded;

CUresult record(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  std::memset(map, 0, sizeof *map);
  const bool of_16_bits = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  recorded = {of_16_bits ? 16 : -1, rank, reinterpret_cast<int64_t>(address)};
  for (cuuint32_t i = 0; i < rank; ++i) {
    for (const uint64_t x : {sizes[i], i > 0 ? strides[i - 1] : 0, uint64_t{box[i]}, uint64_t{steps[i]}})
      recorded.push_back(static_cast<int64_t>(x));
  }
  for (const int x : {int{interleave}, int{swizzle}, int{fill}}) recorded.push_back(x);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(record) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

namespace twins {

std::vector<int64_t> recorded_map() { return recorded; }

const char* encode_for_gpu(const void* address, int rank, const int64_t* sizes, const int64_t* strides,
                           const int* box) {
  CUtensorMap map;
  recorded.clear();
  return shoestring::cuda::encode_tensor_map(&map, address, rank, sizes, strides, box);
}

}  // namespace twins
