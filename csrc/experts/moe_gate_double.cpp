#include "experts/moe_gate_double.h"

#include <ATen/Functions.h>

namespace shoestring::experts {
namespace {

using at::Tensor;
using kernels::Gate;
using kernels::GateKind;

struct GateInDouble {
  GateInDouble(const Gate& gate, const Tensor& h) : gate(gate) {
    const int64_t half = h.size(1) / 2;
    given_g = gate.interleaved ? h.slice(1, 0, {}, 2) : h.narrow(1, 0, half);
    given_u = gate.interleaved ? h.slice(1, 1, {}, 2) : h.narrow(1, half, half);
    const bool oai = gate.kind == GateKind::kSwigluOai;
    const double limit = gate.limit, alpha = oai ? 1.702 : 1;
    const Tensor g = given_g.clamp_max(limit);
    up = given_u.clamp(-limit, limit) + (oai ? 1 : 0);
    if (gate.kind == GateKind::kGelu || gate.kind == GateKind::kGeluTanh) {
      const char* approximate = gate.kind == GateKind::kGelu ? "none" : "tanh";
      value = at::gelu(g, approximate);
      slope = at::gelu_backward(at::ones_like(g), g, approximate);
    } else {
      const Tensor s = at::sigmoid(alpha * g);
      value = g * s;
      slope = s + alpha * g * s * (1 - s);
    }
  }
  Tensor forward() const { return value * up; }
  // Writes to grad_h. upstream: the gradient of the product.
  void backward(const Tensor& upstream, const Tensor& grad_h) const {
    const int64_t half = grad_h.size(1) / 2;
    Tensor to_g = gate.interleaved ? grad_h.slice(1, 0, {}, 2) : grad_h.narrow(1, 0, half);
    Tensor to_u = gate.interleaved ? grad_h.slice(1, 1, {}, 2) : grad_h.narrow(1, half, half);
    to_g.copy_((upstream * up * slope).masked_fill(given_g.gt(gate.limit), 0));
    to_u.copy_((upstream * value).masked_fill(given_u.abs().gt(gate.limit), 0));
  }

  Gate gate;
  Tensor given_g, given_u, up, value, slope;
};

}  // namespace

void gate_in_double(const Gate& gate, const Tensor& h, const Tensor& a) {
  a.copy_(GateInDouble(gate, h).forward());
}

Tensor gate_backward_in_double(const Gate& gate, const Tensor& h, const Tensor& scale, const Tensor& grad,
                               const Tensor& grad_h) {
  const GateInDouble of(gate, h);
  const Tensor product = of.forward(), factor = scale.unsqueeze(1);
  const Tensor along = (grad * product).sum(1);
  of.backward(factor * grad, grad_h);
  grad.copy_(factor * product);
  return along;
}

}  // namespace shoestring::experts
