#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda.h"

namespace shoestring::cuda {
namespace {

const Runtime kRuntime{[](int device) -> void* {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}};
const bool kProvided = (provide("runtime", &kRuntime), true);

}  // namespace
}  // namespace shoestring::cuda
