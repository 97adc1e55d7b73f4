#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

enum class GateKind { kSilu, kGelu, kGeluTanh, kSwigluOai };

/// The gate of an expert: a = activation(g) * (u + offset), where g and u are the two halves of a row of
/// hidden features, clamped if there is a limit: g to at most `limit`, u to [-limit, limit]. `limit` is
/// infinite without one. interleaved: g is at even and u at odd places, else the first and the second half.
/// kSwigluOai is g * sigmoid(1.702 g) with an offset of 1, as in gpt-oss; the others have no offset.
struct Gate {
  GateKind kind;
  float limit;
  bool interleaved;
};

/// CPU kernels of a row of `features` gated features, for one dtype of the rows.
struct GateRows {
  // Writes a (features) of the row h (2 features).
  void (*forward)(const Gate& gate, const void* h, int64_t features, void* a);
  // Writes over `grad`, the gradient of a without the factor `weight`, the row weight * a, and writes to
  // grad_h the gradient of h. Returns the sum of grad * a, the gradient of the weight.
  float (*backward)(const Gate& gate, const void* h, float weight, int64_t features, void* grad,
                    void* grad_h);
};

struct GateTable {
  GateRows of_float, of_bf16, of_fp16;
};

/// CUDA kernels of `slots` rows, as GateRows. All pointers are on the device. The weight of row s is
/// weight[order[s]], and along[order[s]] gets its gradient. Each function returns an error message or null.
struct GateCuda {
  struct Kernels {
    const char* (*forward)(const Gate& gate, const void* h, int64_t slots, int64_t features, void* a,
                           void* stream);
    const char* (*backward)(const Gate& gate, const void* h, const int64_t* order, const float* weight,
                            int64_t slots, int64_t features, void* grad, void* grad_h, float* along,
                            void* stream);
  };
  Kernels of_float, of_bf16, of_fp16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::GateTable, moe_gate)
