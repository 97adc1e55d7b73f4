// grouped_linear on CUDA. The offsets and rows stay on the GPU, so nothing waits for it.

#include <algorithm>
#include <array>
#include <tuple>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "core/tensors.h"
#include "experts/grouped_linear.h"
#include "experts/grouped_linear_table.h"

namespace shoestring::experts {
namespace {

using kernels::GroupedLinearCuda;
using kernels::GroupedMatrix;
using kernels::GroupedProduct;
using kernels::GroupedSlots;

// The gradient of x comes from the products of all slots with some columns of the weights, a multiple of this
// number. The products take at most as much memory as the upstream gradient, if that has enough for one
// multiple.
constexpr int64_t kProductColumns = 128;

const GroupedLinearCuda::Kernels& grouped_kernels(at::ScalarType type) {
  const auto& k = cuda::table<GroupedLinearCuda>(kGroupedLinearOp);
  return type == at::kFloat      ? k.of_float
         : type == at::kDouble   ? k.of_double
         : type == at::kBFloat16 ? k.of_bf16
                                 : k.of_fp16;
}

// Returns the dtype of the operands: fp32 instead of 16 bits if the GPU has no tensor cores for these.
at::ScalarType grouped_operand_type(at::ScalarType type) {
  if (type == at::kFloat || type == at::kDouble) return type;
  bool result = false;
  check_launch(kGroupedLinearOp, cuda::table<GroupedLinearCuda>(kGroupedLinearOp).has_tensor_cores(result));
  return result ? type : at::kFloat;
}

at::ScalarType grouped_sum_type(at::ScalarType operands) {
  return operands == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns the dtype in which kernels write a result that shall have the dtype `wanted`.
at::ScalarType grouped_result_type(at::ScalarType operands, at::ScalarType wanted) {
  return wanted == operands ? wanted : grouped_sum_type(operands);
}

Tensor grouped_operand(const Tensor& t, at::ScalarType type) {
  const Tensor converted = t.to(type);
  return converted.stride(-1) == 1 ? converted : converted.contiguous();
}

GroupedMatrix grouped_matrix(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(-2), t.dim() == 3 ? t.stride(0) : 0};
}

// The slots of a call. The tensors must live until the launches.
struct CudaSlots {
  CudaSlots(const Tensor& offsets, const OptionalTensor& rows, int64_t tokens)
      : offsets(offsets.contiguous()), rows(rows.has_value() ? rows->contiguous() : Tensor()),
        tokens(tokens) {}

  // Slots that refer to rows of x, and slots that are rows.
  GroupedSlots referring() const {
    GroupedSlots slots = plain();
    if (rows.defined()) slots.rows = rows.const_data_ptr<int64_t>();
    return slots;
  }
  GroupedSlots plain() const {
    return {offsets.const_data_ptr<int64_t>(), nullptr, offsets.size(0) - 1, count(), tokens};
  }
  int64_t count() const { return rows.defined() ? rows.size(0) : tokens; }

  Tensor offsets, rows;
  int64_t tokens;
};

Tensor grouped_linear_cuda(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                           const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  check_grouped_linear(x, weight, offsets, rows, bias, dtype);
  const c10::OptionalDeviceGuard guard(x.device());
  const auto type = dtype.value_or(x.scalar_type()), operands = grouped_operand_type(type);
  const CudaSlots slots(offsets, rows, x.size(0));
  const Tensor a = grouped_operand(x.to(type), operands), b = grouped_operand(weight, operands);
  const Tensor added = bias.has_value() ? bias->to(grouped_sum_type(operands)).contiguous() : Tensor();
  const Tensor out = at::empty({slots.count(), weight.size(1)}, a.options());
  GroupedProduct p{slots.referring(), grouped_matrix(a), grouped_matrix(b)};
  p.columns = weight.size(1);
  p.depth = weight.size(2);
  p.bias = added.defined() ? added.const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  p.out_row = p.columns;
  check_launch(kGroupedLinearOp, grouped_kernels(operands).forward(p, stream_of(x)));
  return out.to(type);
}

// Computes the sum over the slots of each row of x, in the order of the slots.
void sum_by_row(const CudaSlots& slots, const Tensor& grad, const Tensor& weight, const Tensor& grad_x) {
  const auto operands = grad.scalar_type();
  const auto [sorted, order] = at::sort(slots.rows, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor starts = at::searchsorted(sorted, at::arange(slots.tokens + 1, sorted.options()));
  const auto options = grad.options().dtype(grouped_sum_type(operands));
  const int64_t columns = weight.size(2), depth = weight.size(1);
  const int64_t fitting = depth * grad.element_size() / static_cast<int64_t>(options.dtype().itemsize());
  const int64_t width =
      std::min(std::max<int64_t>(fitting / kProductColumns, 1) * kProductColumns, (columns + 3) / 4 * 4);
  const Tensor products = at::empty({slots.count(), width}, options);
  const auto& k = grouped_kernels(operands);
  const auto collect = grouped_kernels(grad_x.scalar_type()).collect;
  void* stream = stream_of(grad);
  for (int64_t first = 0; first < columns; first += width) {
    const Tensor b = weight.narrow(2, first, std::min(width, columns - first));
    GroupedProduct p{slots.plain(), grouped_matrix(grad), grouped_matrix(b)};
    p.columns = b.size(2);
    p.depth = depth;
    p.out = products.mutable_data_ptr();
    p.out_row = width;
    p.wide = true;
    check_launch(kGroupedLinearOp, k.input(p, stream));
    const Tensor part = grad_x.narrow(1, first, p.columns);
    check_launch(kGroupedLinearOp, collect(grouped_matrix(products), order.const_data_ptr<int64_t>(),
                                           starts.const_data_ptr<int64_t>(), slots.tokens, p.columns,
                                           part.mutable_data_ptr(), part.stride(0), stream));
  }
}

Tensor grouped_grad_x(const CudaSlots& slots, const Tensor& grad, const Tensor& weight,
                      at::ScalarType x_dtype) {
  const auto operands = grad.scalar_type(), written = grouped_result_type(operands, x_dtype);
  const Tensor grad_x = at::empty({slots.tokens, weight.size(2)}, grad.options().dtype(written));
  if (slots.rows.defined()) {
    sum_by_row(slots, grad, weight, grad_x);
    return grad_x.to(x_dtype);
  }
  GroupedProduct p{slots.plain(), grouped_matrix(grad), grouped_matrix(weight)};
  p.columns = weight.size(2);
  p.depth = weight.size(1);
  p.out = grad_x.mutable_data_ptr();
  p.out_row = p.columns;
  p.wide = written != operands;
  check_launch(kGroupedLinearOp, grouped_kernels(operands).input(p, stream_of(grad)));
  return grad_x.to(x_dtype);
}

Tensor grouped_grad_weight(const CudaSlots& slots, const Tensor& grad, const Tensor& x,
                           const Tensor& weight) {
  const auto operands = grad.scalar_type(), written = grouped_result_type(operands, weight.scalar_type());
  const Tensor grad_weight = at::empty(weight.sizes(), grad.options().dtype(written));
  GroupedProduct p{slots.referring(), grouped_matrix(grad), grouped_matrix(x)};
  p.height = weight.size(1);
  p.columns = weight.size(2);
  p.out = grad_weight.mutable_data_ptr();
  p.out_row = p.columns;
  p.out_group = p.height * p.columns;
  p.wide = written != operands;
  check_launch(kGroupedLinearOp, grouped_kernels(operands).weight(p, stream_of(grad)));
  return grad_weight.to(weight.scalar_type());
}

GroupedGradients grouped_linear_backward_cuda(const Tensor& grad_out, const OptionalTensor& x,
                                              const Tensor& weight, const Tensor& offsets,
                                              const OptionalTensor& rows, int64_t tokens,
                                              at::ScalarType dtype, at::ScalarType x_dtype,
                                              at::ScalarType bias_dtype, std::array<bool, 3> mask) {
  const c10::OptionalDeviceGuard guard(grad_out.device());
  const auto operands = grouped_operand_type(dtype);
  const CudaSlots slots(offsets, rows, tokens);
  const Tensor grad = grouped_operand(grad_out.to(dtype), operands);
  GroupedGradients found;
  if (mask[0]) std::get<0>(found) = grouped_grad_x(slots, grad, grouped_operand(weight, operands), x_dtype);
  if (mask[1]) std::get<1>(found) = grouped_grad_weight(slots, grad, grouped_operand(*x, operands), weight);
  if (!mask[2]) return found;
  const Tensor sums =
      at::empty({slots.plain().groups, grad.size(1)}, grad.options().dtype(grouped_sum_type(operands)));
  check_launch(kGroupedLinearOp,
               grouped_kernels(operands).sum(slots.referring(), grouped_matrix(grad), grad.size(1),
                                             sums.mutable_data_ptr(), stream_of(grad)));
  std::get<2>(found) = sums.to(bias_dtype);
  return found;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("grouped_linear", grouped_linear_cuda);
  m.impl("_grouped_linear_backward", grouped_linear_backward_cuda);
}

}  // namespace
}  // namespace shoestring::experts
