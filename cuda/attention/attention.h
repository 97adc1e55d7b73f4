#pragma once

// What the kernels of attention share on the host: sizes of tiles, launches for a head dimension, and their
// names.

#include <type_traits>

#include "attention/attention_table.h"
#include "cuda/attention/attention_tile.h"
#include "cuda/core/launch.h"

namespace shoestring::cuda {

using kernels::AttentionGradients;
using kernels::AttentionProblem;
using kernels::AttentionTensors;
using kernels::HeadStrides;

// sm_75 lacks the instructions: there kernels are empty, and the launchers refuse the GPU.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasMma = false;
#else
constexpr bool kHasMma = true;
#endif

/// A block has as many rows of queries (or of keys, for their gradients), 16 a warp. Shared memory is 99 KiB
/// at most, which every GPU from sm_80 on has.
template <class T, int kFeatures>
constexpr int kRows = kFeatures * sizeof(T) <= 512 ? 64 : 32;
template <class T, int kFeatures>
constexpr int kThreads = kRows<T, kFeatures> * 2;

/// How a kernel may access a tensor: loads of 16 bytes, stores of two numbers.
struct Access {
  bool vectors, pairs;
};

inline Access access_of(const void* p, const HeadStrides& at, int size) {
  const auto whole = [&](int64_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0 && at.batch * size % bytes == 0 &&
           at.head * size % bytes == 0 && at.token * size % bytes == 0;
  };
  return {whole(16), whole(2 * size)};
}

/// Where a head of a sequence begins.
template <class T>
__device__ T* head_of(T* tensor, const HeadStrides& at, int sequence, int64_t head, int first_token) {
  return tensor + sequence * at.batch + head * at.head + first_token * at.token;
}

/// The current GPU's, 90 for 9.0; returns an error's text, or null.
inline const char* compute_capability(int& capability) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  capability = major * 10 + minor;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// Why this GPU cannot run the kernels, or null.
inline const char* refuse_gpu() {
  int capability = 0;
  if (const char* error = compute_capability(capability)) return error;
  if (capability >= 80) return nullptr;
  return "expected a GPU of compute capability 8.0 or more (its tensor cores), received an older one; use "
         "PyTorch's "
         "scaled_dot_product_attention there";
}

template <int kFeatures>
using Features = std::integral_constant<int, kFeatures>;

/// run(Features<n>{}) with the smallest tile that holds `features`, 1 to 256. fp32, which is for checks more
/// than for training, has fewer: they take time to compile.
template <class T, class Run>
const char* with_features(int64_t features, Run run) {
  if (const char* error = refuse_gpu()) return error;
  if (features <= 32) return run(Features<32>{});
  if (features <= 64) return run(Features<64>{});
  if constexpr (sizeof(T) == 2) {
    if (features <= 96) return run(Features<96>{});
    if (features > 128 && features <= 192) return run(Features<192>{});
  }
  return features <= 128 ? run(Features<128>{}) : run(Features<256>{});
}

/// Whether this is a Hopper GPU and its kernels can do the call: they have fewer options, and copy only what
/// is aligned.
bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t);
bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g);
template <class T>
const char* hopper_attention(const AttentionProblem& p, const AttentionTensors& t, void* stream);
template <class T>
const char* hopper_query_gradient(const AttentionProblem& p, const AttentionTensors& t,
                                  const AttentionGradients& g, void* stream);
template <class T>
const char* hopper_key_gradients(const AttentionProblem& p, const AttentionTensors& t,
                                 const AttentionGradients& g, void* stream);

template <class T>
const char* attention_delta(const AttentionProblem& p, const AttentionTensors& t, const void* grad_out,
                            const HeadStrides& grad_out_at, const float* grad_lse, float* delta,
                            void* stream);
template <class T>
const char* attention_query_gradient(const AttentionProblem& p, const AttentionTensors& t,
                                     const AttentionGradients& g, void* stream);
template <class T>
const char* attention_key_gradients(const AttentionProblem& p, const AttentionTensors& t,
                                    const AttentionGradients& g, void* stream);
template <class T>
const char* attention_bias_gradient(const AttentionProblem& p, const AttentionTensors& t,
                                    const AttentionGradients& g, const kernels::BiasShape& shape,
                                    void* stream);

}  // namespace shoestring::cuda
