#pragma once

#include <cstdint>

namespace shoestring::kernels {

// CPU kernels that compute activation(gate) * up, or the gradients of gate and up, for `count` elements. In
// backward, grad_up may point to `grad`, and grad_gate may point to `gate`. Backward also writes
// activation(gate) * up to `out` unless it is null. If `up` is null, the kernels compute activation(gate) and
// the gradient of gate; backward writes activation(gate) to grad_up unless it is null, and does not use
// `out`.
struct GatedTable {
  void (*forward_float)(const float* gate, const float* up, int64_t count, float* out);
  void (*forward_bf16)(const uint16_t* gate, const uint16_t* up, int64_t count, uint16_t* out);
  void (*forward_fp16)(const uint16_t* gate, const uint16_t* up, int64_t count, uint16_t* out);
  void (*backward_float)(const float* grad, const float* gate, const float* up, int64_t count,
                         float* grad_gate, float* grad_up, float* out);
  void (*backward_bf16)(const uint16_t* grad, const uint16_t* gate, const uint16_t* up, int64_t count,
                        uint16_t* grad_gate, uint16_t* grad_up, uint16_t* out);
  void (*backward_fp16)(const uint16_t* grad, const uint16_t* gate, const uint16_t* up, int64_t count,
                        uint16_t* grad_gate, uint16_t* grad_up, uint16_t* out);
};

// CUDA kernels that compute activation(gate) * up and its gradients. Pointers are on the device; `stream` is
// a cudaStream_t. `up` may be null, as on the CPU. Each function returns an error message, or null.
struct GatedCuda {
  using Forward = const char* (*)(const void* gate, const void* up, int64_t count, void* out, void* stream);
  using Backward = const char* (*)(const void* grad, const void* gate, const void* up, int64_t count,
                                   void* grad_gate, void* grad_up, void* out, void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

}  // namespace shoestring::kernels
