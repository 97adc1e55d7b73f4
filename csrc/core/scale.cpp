#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "core/scale_table.h"
#include "core/tensors.h"

namespace shoestring {
namespace {

using at::Tensor;

void check(const Tensor& x, const Tensor& factor) {
  TORCH_CHECK(is_supported_float(x.scalar_type()) && x.is_contiguous(),
              "scale_: x: expected a contiguous floating-point tensor, received ", x.scalar_type());
  TORCH_CHECK(factor.sym_numel() == 1, "scale_: factor: expected one element, received ", factor.sym_sizes());
  TORCH_CHECK(factor.device() == x.device(), "scale_: factor: expected x's device, ", x.device(),
              ", received ", factor.device());
}

void scale_cpu(Tensor& x, const Tensor& factor) {
  check(x, factor);
  if (factor.item<double>() != 1) x.mul_(factor);
}

void scale_cuda(Tensor& x, const Tensor& factor) {
  check(x, factor);
  const c10::OptionalDeviceGuard guard(x.device());
  const auto& kernels = cuda::table<kernels::ScaleCuda>("scale");
  const auto dtype = x.scalar_type();
  const auto run = dtype == at::kDouble     ? kernels.scale_double
                   : dtype == at::kFloat    ? kernels.scale_float
                   : dtype == at::kBFloat16 ? kernels.scale_bf16
                                            : kernels.scale_fp16;
  const Tensor f = factor.to(compute_type(x));
  check_launch("_scale_", run(x.mutable_data_ptr(), x.numel(), f.const_data_ptr(), stream_of(x)));
}

void scale_meta(Tensor& x, const Tensor& factor) { check(x, factor); }

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl("_scale_", scale_cpu); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("_scale_", scale_cuda); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("_scale_", scale_meta); }

}  // namespace
}  // namespace shoestring
