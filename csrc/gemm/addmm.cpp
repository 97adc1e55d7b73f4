#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/gemm/ops.h>

#include "core/call.h"
#include "core/tensors.h"
#include "gemm/gemm.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

constexpr const char* kOp = "addmm_";

void check(const Tensor& self, const Tensor& mat1, const Tensor& mat2) {
  TORCH_CHECK(mat1.dim() == 2 && mat2.dim() == 2 && mat1.sym_size(1) == mat2.sym_size(0), kOp,
              ": mat1 and mat2: expected shapes (m, k) and (k, n), received ", mat1.sym_sizes(), " and ",
              mat2.sym_sizes());
  TORCH_CHECK(self.dim() == 2 && self.sym_size(0) == mat1.sym_size(0) && self.sym_size(1) == mat2.sym_size(1),
              kOp, ": self: expected shape (", mat1.sym_size(0), ", ", mat2.sym_size(1), "), received ",
              self.sym_sizes());
  TORCH_CHECK(is_supported_float(mat1.scalar_type()) && mat1.scalar_type() == mat2.scalar_type(), kOp,
              ": mat1 and mat2: expected one dtype, fp32, fp64, bf16 or fp16, received ", mat1.scalar_type(),
              " and ", mat2.scalar_type());
  TORCH_CHECK(self.scalar_type() == mat1.scalar_type() ||
                  (self.scalar_type() == at::kFloat && mat1.element_size() == 2),
              kOp, ": self: expected ", mat1.scalar_type(), mat1.element_size() == 2 ? " or fp32" : "",
              ", received ", self.scalar_type());
  TORCH_CHECK(mat1.device() == self.device() && mat2.device() == self.device(), kOp,
              ": expected one device, received self on ", self.device(), ", mat1 on ", mat1.device(),
              ", mat2 on ", mat2.device());
}

void run(Tensor& self, const Tensor& mat1, const Tensor& mat2, double beta, double alpha) {
  check(self, mat1, mat2);
  const c10::OptionalDeviceGuard guard(self.device());
  gemm(self, mat1, mat2, beta, alpha);
}

void on_meta(Tensor& self, const Tensor& mat1, const Tensor& mat2, double, double) {
  check(self, mat1, mat2);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kOp, run); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kOp, run); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kOp, on_meta); }

}  // namespace

}  // namespace shoestring::gemm

namespace shoestring {

using at::Tensor;

void addmm_(const Tensor& self, const Tensor& mat1, const Tensor& mat2, double beta, double alpha) {
  static const auto op =
      find<void(Tensor&, const Tensor&, const Tensor&, double, double)>("shoestring::addmm_");
  Tensor changed = self;
  op.call(changed, mat1, mat2, beta, alpha);
}

}  // namespace shoestring
