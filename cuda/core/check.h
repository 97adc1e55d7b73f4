#pragma once

#include <cuda_runtime.h>

namespace shoestring::cuda {

/// Aborts the kernel with an error message. The host does not have to wait for the kernel. The GPU prints
/// `text` on stderr, and every later CUDA call of the process fails, as after a PyTorch device assertion.
/// `assert` is no alternative, because release builds remove it.
__device__ inline void fail(const char* text) {
#if defined(__CUDA_ARCH__)
  __assert_fail(text, __FILE__, __LINE__, "");
#elif !defined(__CUDACC__)
  simt::fail(text);
#endif
}

/// Aborts the kernel like fail(), but without a message; only the emulator reports `text`. It is for kernels
/// with wgmma, in which a function call is expensive: all wgmma operations must finish before the call.
__device__ inline void stop(const char* text) {
#if defined(__CUDA_ARCH__)
  __trap();
#elif !defined(__CUDACC__)
  simt::fail(text);
#endif
}

}  // namespace shoestring::cuda
