#pragma once

// Host declarations that the CUDA kernels of attention share: tile sizes, the choice of a template by head
// dimension, and the entry points of the kernels.

#include <type_traits>

#include "attention/attention_table.h"
#include "cuda/attention/attention_tile.h"
#include "cuda/core/gpu.h"
#include "cuda/core/launch.h"

namespace shoestring::cuda {

using kernels::AttentionGradients;
using kernels::AttentionProblem;
using kernels::AttentionTensors;
using kernels::HeadStrides;

/// Number of queries that a thread block of attention handles, 16 for each warp. In the kernel for the
/// gradients of K and V it is the number of keys. Shared memory takes at most 99 KiB, which every GPU from
/// sm_80 on has.
template <class T, int kFeatures>
constexpr int kRows = kFeatures * sizeof(T) <= 512 ? 64 : 32;
template <class T, int kFeatures>
constexpr int kThreads = kRows<T, kFeatures> * 2;

/// Says which accesses the alignment of a tensor allows: loads of 16 bytes (vectors), and stores of two
/// elements (pairs).
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

/// Returns the address of token first_token in one head of one sequence.
template <class T>
__device__ T* head_of(T* tensor, const HeadStrides& at, int sequence, int64_t head, int first_token) {
  return tensor + sequence * at.batch + head * at.head + first_token * at.token;
}

/// Returns the reason why the current GPU cannot run the attention kernels, or null.
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

/// Calls run(Features<n>{}), where n is the smallest compiled head dimension that is at least `features` (1
/// to 256). fp32 has fewer compiled head dimensions: it is used for checks more than for training, and each
/// one takes time to compile.
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

/// Returns whether the GPU is a Hopper GPU and the attention kernels for Hopper support this call. The Hopper
/// kernels have fewer options and need aligned tensors.
bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t);
bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g);
/// These functions start kernels on a stream, and return an error message or null.
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
