#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "core/cuda_tables.h"

namespace shoestring::cuda {
namespace {

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  // clears CUDA's last error, so that the next kernel launch does not report this error as its own
  cudaGetLastError();
  return cudaGetErrorString(error);
}

const Runtime kRuntime{
    [](int device) -> void* {
      return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
    },
    [](void* memory, size_t size) {
      return text_of(cudaHostRegister(memory, size, cudaHostRegisterPortable));
    },
    [](void* memory) { return text_of(cudaHostUnregister(memory)); }};
const bool kProvided = (provide("runtime", &kRuntime), true);

}  // namespace
}  // namespace shoestring::cuda
