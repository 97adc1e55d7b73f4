#pragma once

// Runs the kernels of elementwise operators on tensors. core/elementwise_operator.h registers operators that
// consist of such kernels.

#include <initializer_list>

#include <ATen/core/Tensor.h>

#include "core/elementwise_table.h"
#include "core/tensors.h"

namespace shoestring::elementwise {

/// The kernels of an operator, with its options.
struct Kernels {
  const char* name;  // name of the CUDA kernel table
  const kernels::ElementwiseTable& cpu;
  const void* rule = nullptr;  // the rule, which may be null if it has no members
};

/// Raises unless t has the shape, dtype and device of `model`. model_name: its name in the error.
void check_like(const char* op, const char* name, const at::Tensor& t, const char* model_name,
                const at::Tensor& model);
/// Raises unless t is fp32, fp64, bf16 or fp16.
void check_float(const char* op, const char* name, const at::Tensor& t);

/// Raises unless the inputs of an operator are floating-point, and alike in shape, dtype and device.
template <class... Inputs>
void check_alike(const char* op, const char* const (&names)[sizeof...(Inputs)], const Inputs&... inputs) {
  constexpr size_t last = sizeof...(Inputs) - 1;
  const at::Tensor* all[] = {&inputs...};
  check_float(op, names[last], *all[last]);
  for (size_t k = 0; k < last; ++k) check_like(op, names[k], *all[k], names[last], *all[last]);
}
/// Raises unless kernels can write over t: it is contiguous, and not fp64.
void check_written(const char* op, const char* name, const at::Tensor& t);

/// Returns a new contiguous tensor with the shape, dtype and device of t.
at::Tensor like(const at::Tensor& t);

/// Runs the kernel of forward. Inputs are contiguous, and fp32, bf16 or fp16.
at::Tensor forward(const Kernels& kernels, Backend backend, std::initializer_list<at::Tensor> inputs);

/// Runs the kernel of backward. inputs: the upstream gradient, and the inputs of forward. outputs: the
/// gradients, which may be written over inputs, and further results of the rule. All are contiguous.
void backward(const Kernels& kernels, Backend backend, std::initializer_list<at::Tensor> inputs,
              at::ArrayRef<at::Tensor> outputs);

/// Returns whether a backward that uses its saved tensors once may write a gradient over this input.
bool may_overwrite(const at::Tensor& input);

}  // namespace shoestring::elementwise
