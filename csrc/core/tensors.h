#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring {

/// Selects whether an operator runs its CPU or its CUDA kernels. The operator's dispatch key decides, not the
/// device of its tensors, because the emulator runs the CUDA kernels on CPU tensors.
enum class Backend { kCpu, kCuda };

/// Returns the dtype in which an operator on x computes: fp64 for fp64, else fp32.
inline at::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Returns whether operators compute with this dtype: fp32, fp64, bf16 or fp16. at::isFloatingType also
/// accepts 8-bit floats, whose elements kernels would read and write as 16-bit numbers, past the end of the
/// tensor.
inline bool is_supported_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

/// Return a pointer to the elements of a bf16 or fp16 tensor as the 16-bit integers that the CPU kernels
/// take.
inline uint16_t* bits(const at::Tensor& t) { return static_cast<uint16_t*>(t.mutable_data_ptr()); }
inline const uint16_t* const_bits(const at::Tensor& t) {
  return static_cast<const uint16_t*>(t.const_data_ptr());
}

/// Views x (..., features) as (tokens, features).
inline at::Tensor as_matrix(const at::Tensor& x) {
  int64_t tokens = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) tokens *= x.size(i);
  return x.reshape({tokens, x.size(-1)});
}

/// Returns x's shape with `features` in place of its last size.
inline std::vector<c10::SymInt> with_last(const at::Tensor& x, const c10::SymInt& features) {
  auto shape = x.sym_sizes().vec();
  shape.back() = features;
  return shape;
}

}  // namespace shoestring
