// grouped_linear on CUDA. The offsets and rows stay on the GPU, so nothing waits for it.

#include "experts/grouped_linear_cuda.h"

#include <algorithm>
#include <array>
#include <tuple>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "experts/grouped_linear.h"

namespace shoestring::experts {

using kernels::GroupedLinearCuda;
using kernels::GroupedProduct;
using kernels::GroupedSlots;
using kernels::GroupedSums;

namespace {

// The kernels multiply at least so many columns at once, and a multiple of this number, so that copies are
// aligned and full.
constexpr int64_t kProductColumns = 128;

// Returns the dtype in which kernels write a result that shall have the dtype `wanted`.
at::ScalarType grouped_result_type(at::ScalarType operands, at::ScalarType wanted) {
  return wanted == operands ? wanted : grouped_sum_type(operands);
}

}  // namespace

const GroupedLinearCuda::Kernels& grouped_kernels(at::ScalarType type) {
  const auto& k = cuda::table<GroupedLinearCuda>(kGroupedLinearOp);
  return type == at::kFloat      ? k.of_float
         : type == at::kDouble   ? k.of_double
         : type == at::kBFloat16 ? k.of_bf16
                                 : k.of_fp16;
}

at::ScalarType grouped_operand_type(at::ScalarType type) {
  if (type == at::kFloat || type == at::kDouble) return type;
  bool result = false;
  check_launch(kGroupedLinearOp, cuda::table<GroupedLinearCuda>(kGroupedLinearOp).has_tensor_cores(result));
  return result ? type : at::kFloat;
}

void multiply_slots(const GroupedSlots& slots, const Tensor& a, const GroupedFactor& factor,
                    const Tensor& bias, const Tensor& out, bool keep) {
  GroupedProduct p{slots, grouped_matrix(a), grouped_matrix(factor.stack)};
  p.columns = factor.columns();
  p.depth = factor.depth();
  if (bias.defined()) {
    p.bias = bias.const_data_ptr();
    p.bias_group = bias.stride(0);
  }
  p.out = out.mutable_data_ptr();
  p.out_row = out.stride(0);
  p.wide = out.scalar_type() != a.scalar_type();
  p.keep = keep;
  const auto& k = grouped_kernels(a.scalar_type());
  check_launch(kGroupedLinearOp, (factor.depth_first ? k.input : k.forward)(p, stream_of(a)));
}

void collect_products(const Tensor& products, const GroupedSums& sums, const Tensor& out) {
  check_launch(kGroupedLinearOp, grouped_kernels(out.scalar_type())
                                     .collect(grouped_matrix(products), sums, out.size(0), out.size(1),
                                              out.mutable_data_ptr(), out.stride(0), stream_of(products)));
}

void sum_products(const GroupedSlots& slots, const Tensor& a, const GroupedFactor& factor, const Tensor& bias,
                  const GroupedSums& sums, int64_t width, const Tensor& out) {
  const int64_t columns = factor.columns();
  width = std::min(std::max<int64_t>(width / kProductColumns, 1) * kProductColumns, (columns + 3) / 4 * 4);
  const Tensor products =
      at::empty({slots.slots, width}, a.options().dtype(grouped_sum_type(a.scalar_type())));
  for (int64_t first = 0; first < columns; first += width) {
    const int64_t count = std::min(width, columns - first);
    multiply_slots(slots, a, factor.narrow(first, count),
                   bias.defined() ? bias.narrow(1, first, count) : Tensor(), products);
    collect_products(products, sums, out.narrow(1, first, count));
  }
}

Tensor add_products(const GroupedSlots& slots, const Tensor& a, const Tensor& b, bool turned,
                    const Tensor& weight) {
  const auto operands = a.scalar_type(), written = grouped_result_type(operands, weight.scalar_type());
  const Tensor sums = at::empty(weight.sizes(), a.options().dtype(written));
  GroupedProduct p{slots, grouped_matrix(a), grouped_matrix(b)};
  p.height = weight.size(1);
  p.columns = weight.size(2);
  p.out = sums.mutable_data_ptr();
  p.out_row = p.columns;
  p.out_group = p.height * p.columns;
  p.wide = written != operands;
  p.turned = turned;
  check_launch(kGroupedLinearOp, grouped_kernels(operands).weight(p, stream_of(a)));
  return sums.to(weight.scalar_type());
}

Tensor add_rows(const GroupedSlots& slots, const Tensor& a, bool refer, const Tensor& scale) {
  const auto operands = a.scalar_type();
  const Tensor sums = at::empty({slots.groups, a.size(1)}, a.options().dtype(grouped_sum_type(operands)));
  check_launch(kGroupedLinearOp,
               grouped_kernels(operands).sum(slots, grouped_matrix(a), a.size(1), refer,
                                             scale.defined() ? scale.const_data_ptr() : nullptr,
                                             sums.mutable_data_ptr(), stream_of(a)));
  return sums;
}

namespace {

Tensor grouped_linear_cuda(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                           const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  check_grouped_linear(x, weight, offsets, rows, bias, dtype);
  const c10::OptionalDeviceGuard guard(x.device());
  const auto type = dtype.value_or(x.scalar_type()), operands = grouped_operand_type(type);
  const CudaSlots slots(offsets, rows, x.size(0));
  const Tensor a = grouped_operand(x.to(type), operands);
  const Tensor out = at::empty({slots.count(), weight.size(1)}, a.options());
  multiply_slots(slots.referring(), a, {grouped_operand(weight, operands)},
                 bias.has_value() ? bias->to(grouped_sum_type(operands)).contiguous() : Tensor(), out);
  return out.to(type);
}

// Computes the sum over the slots of each row of x, in the order of the slots. The products take at most as
// much memory as the upstream gradient, if that has enough for one step of the kernels.
void sum_by_row(const CudaSlots& slots, const Tensor& grad, const GroupedFactor& weight,
                const Tensor& grad_x) {
  const auto [sorted, order] = at::sort(slots.rows, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor starts = at::searchsorted(sorted, at::arange(slots.tokens + 1, sorted.options()));
  GroupedSums sums{order.const_data_ptr<int64_t>()};
  sums.starts = starts.const_data_ptr<int64_t>();
  const auto of_sum = static_cast<int64_t>(c10::elementSize(grouped_sum_type(grad.scalar_type())));
  sum_products(slots.plain(), grad, weight, {}, sums, grad.size(1) * grad.element_size() / of_sum, grad_x);
}

Tensor grouped_grad_x(const CudaSlots& slots, const Tensor& grad, const GroupedFactor& weight,
                      at::ScalarType x_dtype) {
  const auto written = grouped_result_type(grad.scalar_type(), x_dtype);
  const Tensor grad_x = at::empty({slots.tokens, weight.columns()}, grad.options().dtype(written));
  slots.rows.defined() ? sum_by_row(slots, grad, weight, grad_x)
                       : multiply_slots(slots.plain(), grad, weight, {}, grad_x);
  return grad_x.to(x_dtype);
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
  if (mask[0])
    std::get<0>(found) = grouped_grad_x(slots, grad, {grouped_operand(weight, operands), true}, x_dtype);
  if (mask[1])
    std::get<1>(found) = add_products(slots.referring(), grad, grouped_operand(*x, operands), false, weight);
  if (mask[2]) std::get<2>(found) = add_rows(slots.referring(), grad).to(bias_dtype);
  return found;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("grouped_linear", grouped_linear_cuda);
  m.impl("_grouped_linear_backward", grouped_linear_backward_cuda);
}

}  // namespace
}  // namespace shoestring::experts
