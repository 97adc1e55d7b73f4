#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using FakeQuantizeSignature = Tensor(const Tensor&, c10::string_view, std::optional<int64_t>, bool);

Tensor call_fake_quantize(const Tensor& x, c10::string_view quant_type, std::optional<int64_t> block_size,
                          bool double_quant) {
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<FakeQuantizeSignature>("shoestring::fake_quantize");
  return op.call(x, quant_type, block_size, double_quant);
}

// Autograd of fake_quantize, whose derivative is zero almost everywhere. The straight-through estimator
// (arXiv 1308.3432) takes it for the identity: the gradient of the result is the gradient of x. Nothing is
// saved.
class FakeQuantize : public torch::autograd::Function<FakeQuantize> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& x, c10::string_view quant_type,
                        std::optional<int64_t> block_size, bool double_quant) {
    return call_fake_quantize(x, quant_type, block_size, double_quant);
  }
  static variable_list backward(AutogradContext*, const variable_list& grad_outputs) {
    return {grad_outputs[0], Tensor(), Tensor(), Tensor()};
  }
};

Tensor fake_quantize_autograd(const Tensor& x, c10::string_view quant_type, std::optional<int64_t> block_size,
                              bool double_quant) {
  if (needs_grad(x)) return FakeQuantize::apply(x, quant_type, block_size, double_quant);
  return call_fake_quantize(x, quant_type, block_size, double_quant);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("fake_quantize", fake_quantize_autograd); }

}  // namespace
}  // namespace shoestring::quantization
