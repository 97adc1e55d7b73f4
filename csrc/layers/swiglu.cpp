#include "layers/swiglu.h"

#include <shoestring/layers/ops.h>

#include "core/elementwise_operator.h"
#include "layers/gated.h"
#include "layers/swiglu_rule.h"

namespace shoestring::layers {

using at::Tensor;

namespace {

struct Swiglu : elementwise::Differentiable<Swiglu> {
  static constexpr const char* kName = "swiglu";
  static constexpr const char* kInputs[] = {"gate", "up"};
  using Options = std::tuple<>;

  void check(const char* op, const Tensor& gate, const Tensor& up) const { check_gated(op, gate, up); }
  elementwise::Kernels tables() const { return {kName, cpu::swiglu()}; }
  Tensor forward_fp64(const Tensor& gate, const Tensor& up) const { return at::silu(gate).mul_(up); }
  std::array<Tensor, 2> backward_fp64(const Tensor& grad, const Tensor& gate, const Tensor& up) const {
    const Tensor s = at::sigmoid(gate), silu = gate.mul(s);
    return {grad.mul(up).mul_(at::sigmoid(gate.neg()).mul_(silu).add_(s)), grad.mul(silu)};
  }
};

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // swiglu returns silu(gate) * up.
  elementwise::define<Swiglu>(m, "swiglu(Tensor gate, Tensor up) -> Tensor");
}
SHOESTRING_ELEMENTWISE(Swiglu)

}  // namespace

Tensor swiglu_forward(Backend backend, const Tensor& gate, const Tensor& up) {
  const Swiglu op;
  if (up.scalar_type() == at::kDouble) return op.forward_fp64(gate, up);
  return elementwise::forward(op.tables(), backend, {gate.contiguous(), up.contiguous()});
}

std::tuple<Tensor, Tensor, Tensor> swiglu_backward(Backend backend, const Tensor& grad, const Tensor& gate,
                                                   const Tensor& up, bool with_product) {
  const Swiglu op;
  if (up.scalar_type() == at::kDouble) {
    auto [by_gate, by_up] = op.backward_fp64(grad, gate, up);
    return {by_gate, by_up, with_product ? gate.mul(at::sigmoid(gate)).mul_(up) : Tensor()};
  }
  const Tensor results[] = {elementwise::like(gate), elementwise::like(up),
                            with_product ? elementwise::like(up) : Tensor()};
  elementwise::backward(op.tables(), backend, {grad.contiguous(), gate.contiguous(), up.contiguous()},
                        at::ArrayRef<Tensor>(results, with_product ? 3 : 2));
  return {results[0], results[1], results[2]};
}

}  // namespace shoestring::layers

namespace shoestring {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return elementwise::Operator<layers::Swiglu>::call(gate, up);
}

}  // namespace shoestring
