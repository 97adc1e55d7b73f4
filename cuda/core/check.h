#pragma once

#include <cuda_runtime.h>

namespace shoestring::cuda {

/// Ends the launch with an error message without making the host wait. The GPU prints `text` on stderr, and
/// every later CUDA call of the process fails, as after a PyTorch device assertion. `assert` would not do,
/// because release builds remove it.
__device__ inline void fail(const char* text) {
#if defined(__CUDA_ARCH__)
  __assert_fail(text, __FILE__, __LINE__, "");
#elif !defined(__CUDACC__)
  simt::fail(text);
#endif
}

/// Ends the launch like fail() but without a message; only the emulator reports `text`. For code in which a
/// function call is expensive, because wgmma operations must have finished before a call.
__device__ inline void stop(const char* text) {
#if defined(__CUDA_ARCH__)
  __trap();
#elif !defined(__CUDACC__)
  simt::fail(text);
#endif
}

}  // namespace shoestring::cuda
