#pragma once

#include <cuda_runtime.h>

namespace shoestring::cuda {

/// Ends the launch with `text`, without the host waiting: the GPU prints it on stderr and every later CUDA
/// call of the process fails, as after an assertion of PyTorch's. Not `assert`, which a release build
/// removes.
__device__ inline void fail(const char* text) {
#if defined(__CUDA_ARCH__)
  __assert_fail(text, __FILE__, __LINE__, "");
#elif !defined(__CUDACC__)
  simt::fail(text);
#endif
}

/// The same without the text, which only the emulator says: where a function's call costs, as wgmma has to be
/// over at one.
__device__ inline void stop(const char* text) {
#if defined(__CUDA_ARCH__)
  __trap();
#elif !defined(__CUDACC__)
  simt::fail(text);
#endif
}

}  // namespace shoestring::cuda
