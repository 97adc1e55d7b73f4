#include <shoestring/layers/ops.h>

#include "core/elementwise_operator.h"
#include "layers/gated.h"
#include "layers/geglu_table.h"

namespace shoestring::layers {
namespace {

using at::Tensor;

struct Gelu : elementwise::Differentiable<Gelu> {
  static constexpr const char* kName = "gelu";
  static constexpr const char* kInputs[] = {"x"};
  using Options = std::tuple<c10::string_view>;
  c10::string_view approximate;
  explicit Gelu(c10::string_view approximate) : approximate(approximate) {}

  void check(const char* op, const Tensor& x) const {
    elementwise::check_float(op, "x", x);
    check_approximate(op, approximate);
  }
  elementwise::Kernels tables() const {
    if (approximate == "tanh") return {"gelu_tanh", cpu::gelu_tanh()};
    return {"gelu_erf", cpu::gelu_erf()};
  }
  Tensor forward_fp64(const Tensor& x) const { return at::gelu(x.contiguous(), approximate); }
  std::array<Tensor, 1> backward_fp64(const Tensor& grad, const Tensor& x) const {
    return {at::gelu_backward(grad.contiguous(), x.contiguous(), approximate)};
  }
};

constexpr const char* kGeluBackwardValue = "_gelu_backward_value_";

Gelu checked_gelu_value(const Tensor& grad, const Tensor& x, const Tensor& grad_x,
                        c10::string_view approximate) {
  elementwise::check_like(kGeluBackwardValue, "grad_x", grad_x, "x", x);
  return elementwise::Operator<Gelu>::checked_backward(kGeluBackwardValue, grad, x, approximate);
}

template <Backend backend>
void run_gelu_backward_value(Tensor& grad, const Tensor& x, Tensor& grad_x, c10::string_view approximate) {
  const Gelu op = checked_gelu_value(grad, x, grad_x, approximate);
  if (x.scalar_type() == at::kDouble) {
    const Tensor value = at::gelu(x, approximate);
    grad_x.copy_(at::gelu_backward(grad, x, approximate));
    grad.copy_(value);
    return;
  }
  elementwise::check_written(kGeluBackwardValue, "grad", grad);
  elementwise::check_written(kGeluBackwardValue, "grad_x", grad_x);
  elementwise::backward(op.tables(), backend, {grad, x.contiguous()}, {grad_x, grad});
}

void gelu_backward_value_meta(Tensor& grad, const Tensor& x, Tensor& grad_x, c10::string_view approximate) {
  checked_gelu_value(grad, x, grad_x, approximate);
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // gelu returns gelu(x). approximate: as for geglu.
  elementwise::define<Gelu>(m, "gelu(Tensor x, str approximate='none') -> Tensor");
  // Writes the gradient of x to grad_x, which may be x itself, and gelu(x) over grad_output.
  m.def("_gelu_backward_value_(Tensor(a!) grad_output, Tensor x, Tensor(b!) grad_x, str approximate) -> ()");
}
SHOESTRING_ELEMENTWISE(Gelu)
TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kGeluBackwardValue, run_gelu_backward_value<Backend::kCpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl(kGeluBackwardValue, run_gelu_backward_value<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kGeluBackwardValue, gelu_backward_value_meta); }

}  // namespace
}  // namespace shoestring::layers

namespace shoestring {

at::Tensor gelu(const at::Tensor& x, const std::string& approximate) {
  return elementwise::Operator<layers::Gelu>::call(x, approximate);
}

}  // namespace shoestring
