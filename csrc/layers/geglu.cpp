#include <shoestring/layers/ops.h>

#include "core/elementwise_operator.h"
#include "layers/gated.h"
#include "layers/geglu_table.h"

namespace shoestring::layers {
namespace {

using at::Tensor;

struct Geglu : elementwise::Differentiable<Geglu> {
  static constexpr const char* kName = "geglu";
  static constexpr const char* kInputs[] = {"gate", "up"};
  using Options = std::tuple<c10::string_view>;
  c10::string_view approximate;
  explicit Geglu(c10::string_view approximate) : approximate(approximate) {}

  void check(const char* op, const Tensor& gate, const Tensor& up) const {
    check_gated(op, gate, up);
    check_approximate(op, approximate);
  }
  elementwise::Kernels tables() const {
    if (approximate == "tanh") return {"geglu_tanh", cpu::geglu_tanh()};
    return {"geglu_erf", cpu::geglu_erf()};
  }
  Tensor forward_fp64(const Tensor& gate, const Tensor& up) const {
    return at::gelu(gate, approximate).mul_(up);
  }
  std::array<Tensor, 2> backward_fp64(const Tensor& grad, const Tensor& gate, const Tensor& up) const {
    return {at::gelu_backward(grad.mul(up), gate, approximate), at::gelu(gate, approximate).mul_(grad)};
  }
};

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // geglu returns gelu(gate) * up. approximate: 'tanh' or 'none', as in torch.nn.functional.gelu.
  elementwise::define<Geglu>(m, "geglu(Tensor gate, Tensor up, str approximate='none') -> Tensor");
}
SHOESTRING_ELEMENTWISE(Geglu)

}  // namespace
}  // namespace shoestring::layers

namespace shoestring {

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, const std::string& approximate) {
  return elementwise::Operator<layers::Geglu>::call(gate, up, approximate);
}

}  // namespace shoestring
