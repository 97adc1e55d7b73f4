// Computes initial values of adapters: from the base weight for PiSSA, OLoRA and LoftQ, and from the
// adapter's own random seed for VeRA.
#include "adapters/initialize.h"

#include <cmath>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/library.h>

#include "adapters/low_rank.h"
#include "quantization/without_weight.h"

namespace shoestring::lora {
namespace {

using at::Tensor;

// Returns U, S and V^T for the `count` largest singular values S of `matrix`. Uses a randomised range finder
// with power iterations (Halko et al., arXiv 0909.4061).
std::tuple<Tensor, Tensor, Tensor> randomized_svd(const Tensor& matrix, int64_t count, int64_t iterations) {
  const bool wide = matrix.size(0) < matrix.size(1);
  const Tensor tall = wide ? matrix.t() : matrix;
  const auto basis = [](const Tensor& t) { return std::get<0>(at::linalg_qr(t)); };
  Tensor Q = basis(tall.mm(at::randn({tall.size(1), count}, tall.options())));
  for (int64_t i = 0; i < iterations; ++i) Q = basis(tall.mm(basis(tall.t().mm(Q))));
  auto [U, values, V] = at::linalg_svd(Q.t().mm(tall), /*full_matrices=*/false);
  U = Q.mm(U);
  return wide ? std::tuple(V.t(), values, U.t()) : std::tuple(U, values, V);
}

// Returns lora_A and lora_B, whose product lora_B lora_A is the best approximation of matrix / scaling with
// the adapter's rank. The square roots of the singular values are factors of both matrices.
std::pair<Tensor, Tensor> halves(const Tensor& matrix, const nn::LoraOptions& options, int64_t iterations) {
  const int64_t rank = options.rank();
  auto [U, values, V] = iterations > 0 ? randomized_svd(matrix, rank, iterations)
                                       : at::linalg_svd(matrix, /*full_matrices=*/false);
  const Tensor roots = (values.narrow(0, 0, rank) / options.scaling()).sqrt();
  return {roots.unsqueeze(1) * V.narrow(0, 0, rank), U.narrow(1, 0, rank) * roots};
}

// Quantises a dense weight and returns it dequantised, i.e. with its quantisation error.
Tensor quantized(const Tensor& dense, const QuantizeOptions& quantize, bool double_quant) {
  nn::QuantizedLinear form = quantization::without_weight(
      nn::QuantizedLinearOptions(dense.size(1), dense.size(0)).quantize(quantize).double_quant(double_quant));
  form->set_weight(dense);
  return form->dequantize(at::kFloat).to(dense.scalar_type());
}

// Returns dense - scaling * lora_B lora_A, lora_A and lora_B. quantize, double_quant: how the caller will
// quantise the difference; null if it will not.
std::tuple<Tensor, Tensor, Tensor> take_out_of(const std::string& caller, const Tensor& dense,
                                               const nn::LoraOptions& options,
                                               const QuantizeOptions* quantize, bool double_quant) {
  const std::string& init = options.init();
  Tensor A, B;
  if (init == "olora") {
    const auto [Q, R] = at::linalg_qr(dense);
    A = R.narrow(0, 0, options.rank());
    B = Q.narrow(1, 0, options.rank());
  } else if (init == "loftq") {
    TORCH_CHECK_VALUE(quantize != nullptr, caller,
                      ": init: expected quantize with 'loftq', which fits the adapter to the quantisation "
                      "error; received none");
    Tensor remaining = dense;
    for (int64_t i = 0; i < options.loftq_iterations(); ++i) {
      std::tie(A, B) = halves(dense - quantized(remaining, *quantize, double_quant), options, 0);
      remaining = at::addmm(dense, B, A, 1, -options.scaling());
    }
  } else {
    const auto at = init.find("_niter_");
    std::tie(A, B) = halves(dense, options, at == std::string::npos ? 0 : std::stoll(init.substr(at + 7)));
  }
  return {at::addmm(dense, B, A, 1, -options.scaling()), A.contiguous(), B.contiguous()};
}

}  // namespace

nn::AdapterImpl::Tensors take_out(nn::AdaptableLinearImpl& layer, const nn::LoraOptions& options,
                                  const QuantizeOptions* quantize, bool double_quant) {
  const torch::NoGradGuard no_grad;
  const bool again = layer.is_quantized();
  const auto [remaining, A, B] = take_out_of("lora::apply", layer.dense_weight(), options,
                                             again ? &layer.base->options.quantize() : quantize,
                                             again ? layer.base->options.double_quant() : double_quant);
  layer.set_weight(remaining);
  nn::AdapterImpl::Tensors initial;
  initial.insert("lora_A", A);
  initial.insert("lora_B", B);
  return initial;
}

nn::AdapterImpl::Tensors projection(const nn::VeraOptions& options, int64_t in_features,
                                    int64_t out_features) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed()));
  const auto drawn = [&](int64_t rows, int64_t columns) {
    const double bound = std::sqrt(6.0 / static_cast<double>(columns));
    return at::empty({rows, columns}, at::kFloat).uniform_(-bound, bound, generator);
  };
  nn::AdapterImpl::Tensors matrices;
  matrices.insert("vera_A", drawn(options.rank(), in_features));
  matrices.insert("vera_B", drawn(out_features, options.rank()));
  return matrices;
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_lora_take_out", [](const Tensor& dense, const std::string& init, int64_t rank, double alpha,
                              bool rslora, int64_t iterations, const std::optional<std::string>& quantize,
                              int64_t block_size, bool double_quant) {
    const auto form = QuantizeOptions().quant_type(quantize.value_or("nf4")).block_size(block_size);
    auto options = nn::LoraOptions().rank(rank).alpha(alpha).rslora(rslora).init(init);
    return take_out_of("lora.apply", dense, options.loftq_iterations(iterations),
                       quantize.has_value() ? &form : nullptr, double_quant);
  });
}

}  // namespace shoestring::lora
