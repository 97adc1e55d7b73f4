#pragma once

// The kernels of an elementwise operator and of its gradients. CPU and CUDA kernels share the operator's
// formula, the rule, which is in NAME_rule.h:
//
//     struct Rule {
//       static constexpr int kInputs = 2, kOutputs = 2;
//       template <class V, class Math>
//       SHOESTRING_HOST_DEVICE void forward(const V (&in)[2], V (&out)[1], Math math) const;
//       template <class V, class Math>
//       SHOESTRING_HOST_DEVICE void backward(const V (&in)[3], V (&out)[2], Math math) const;
//     };
//
// V holds fp32 numbers: a register of CPU kernels, or one number of CUDA kernels. Math has the functions of V
// (core/elementwise_simd.h, cuda/core/elementwise.h). The inputs of backward are the upstream gradient and
// the inputs of forward. Its first results are the gradients of the kInputs inputs; further results, up to
// kOutputs, are only written if the caller wants them. The members of a rule are the operator's options.

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"

namespace shoestring::kernels {

// Each array holds the kernels for fp32, bf16 and fp16. `rule` points to the rule, and is not read if the
// rule has no members. `in` and `out` hold the addresses of arrays of `count` elements. A result may be
// written over an input; further results of backward may be null.
struct ElementwiseTable {
  using Run = void (*)(const void* rule, const void* const* in, int64_t count, void* const* out);
  Run forward[3], backward[3];
};

// Like ElementwiseTable, for arrays on the device. `stream` is a cudaStream_t. Each function returns an error
// message, or null.
struct ElementwiseCuda {
  using Run = const char* (*)(const void* rule, const void* const* in, int64_t count, void* const* out,
                              void* stream);
  Run forward[3], backward[3];
};

/// Returns the rule to which a kernel's argument points.
template <class Rule>
SHOESTRING_HOST_DEVICE Rule rule_at(const void* rule) {
  if constexpr (__is_empty(Rule)) {
    return {};
  } else {
    return *static_cast<const Rule*>(rule);
  }
}

}  // namespace shoestring::kernels
