#include <tuple>

#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> call_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                     std::optional<int64_t> rotary_dim, bool interleaved,
                                     const OptionalTensor& position_ids, const OptionalTensor& q_weight,
                                     const OptionalTensor& k_weight, double eps, double offset) {
  static auto op = find<decltype(call_rope)>("shoestring::rope");
  return op.call(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
}

using RopeBackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
    std::optional<int64_t>, bool, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
    double, bool);

// Autograd of rope. The backward of a rotation is the inverse rotation, which needs no inputs. q and k are
// therefore saved only if they are normalised before the rotation.
class Rope : public torch::autograd::Function<Rope> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos,
                               const Tensor& sin, std::optional<int64_t> rotary_dim, bool interleaved,
                               const OptionalTensor& position_ids, const OptionalTensor& q_weight,
                               const OptionalTensor& k_weight, double eps, double offset) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [new_q, new_k] =
        call_rope(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
    const bool normed = q_weight.has_value();
    const OptionalTensor none;
    save_fields(ctx, Saved{normed ? OptionalTensor(q) : none, normed ? OptionalTensor(k) : none, position_ids,
                           q_weight, k_weight, cos, sin, rotary_dim, interleaved,
                           wants_grad(q_weight) || wants_grad(k_weight), eps, offset});
    return {new_q, new_k};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    Tensor to_q, to_k, to_q_weight, to_k_weight;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<RopeBackwardSignature>("shoestring::_rope_backward");
      std::tie(to_q, to_k, to_q_weight, to_k_weight) =
          op.call(upstream[0], upstream[1], saved.q, saved.k, saved.cos, saved.sin, saved.rotary_dim,
                  saved.interleaved, saved.position_ids, saved.q_weight, saved.k_weight, saved.eps,
                  saved.offset, saved.weight_grad);
    }
    if (!saved.weight_grad) to_q_weight = to_k_weight = Tensor();
    const variable_list g = once_differentiable("rope", {to_q, to_k, to_q_weight, to_k_weight});
    return {g[0], g[1], {}, {}, {}, {}, {}, g[2], g[3], {}, {}};
  }

 private:
  struct Saved {
    OptionalTensor q, k, position_ids, q_weight, k_weight;
    Tensor cos, sin;
    std::optional<int64_t> rotary_dim;
    bool interleaved = false, weight_grad = false;
    double eps = 0, offset = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.q, self.k, self.position_ids, self.q_weight, self.k_weight, self.cos, self.sin,
                 self.rotary_dim, self.interleaved, self.weight_grad, self.eps, self.offset);
    }
  };
};

std::tuple<Tensor, Tensor> rope_autograd(const Tensor& q, const Tensor& k, const Tensor& cos,
                                         const Tensor& sin, std::optional<int64_t> rotary_dim,
                                         bool interleaved, const OptionalTensor& position_ids,
                                         const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                         double eps, double offset) {
  TORCH_CHECK(!needs_grad(cos, sin),
              "rope: cos, sin: expected tables without gradients, received one with requires_grad; "
              "detach it, or rotate in plain PyTorch");
  const Tensor none;
  if (needs_grad(q, k, q_weight.value_or(none), k_weight.value_or(none))) {
    const variable_list results =
        Rope::apply(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_rope(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("rope", rope_autograd); }

}  // namespace
}  // namespace shoestring::layers
