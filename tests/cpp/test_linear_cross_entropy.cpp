#include "catch.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <shoestring/ops.h>

using at::Tensor;
using shoestring::LinearCrossEntropyOptions;

namespace {

// fp64, with the logits whole in memory.
Tensor reference(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& bias,
                 const LinearCrossEntropyOptions& options) {
  Tensor logits = at::linear(hidden, weight, bias);
  if (options.softcap() != 0) logits = options.softcap() * at::tanh(logits / options.softcap());
  const auto reduction = options.reduction() == "mean"  ? at::Reduction::Mean
                         : options.reduction() == "sum" ? at::Reduction::Sum
                                                        : at::Reduction::None;
  return at::cross_entropy_loss(logits, target, {}, reduction, options.ignore_index(), options.label_smoothing());
}

double error(const Tensor& a, const Tensor& b) {
  return (a.to(at::kDouble) - b).norm().item<double>() / (b.norm().item<double>() + 1e-30);
}

void compare(int64_t tokens, int64_t features, int64_t vocab, const LinearCrossEntropyOptions& options,
             at::ScalarType dtype, double tolerance) {
  at::manual_seed(7);
  CAPTURE(tokens, features, vocab, options.reduction(), shoestring::cpu_capability());
  Tensor hidden = at::randn({tokens, features}).to(dtype).requires_grad_();
  Tensor weight = at::randn({vocab, features}).to(dtype).requires_grad_();
  Tensor bias = at::randn({vocab}).to(dtype).requires_grad_();
  Tensor target = at::randint(vocab, {tokens});
  target[0] = options.ignore_index();
  Tensor loss = shoestring::linear_cross_entropy(hidden, weight, target, bias, options);
  Tensor upstream = at::randn_like(loss);
  auto gradients = torch::autograd::grad({loss}, {hidden, weight, bias}, {upstream});

  std::vector<Tensor> exact;
  for (const Tensor& t : {hidden, weight, bias}) exact.push_back(t.detach().to(at::kDouble).requires_grad_());
  Tensor expected = reference(exact[0], exact[1], target, exact[2], options);
  auto expected_gradients = torch::autograd::grad({expected}, exact, {upstream.to(at::kDouble)});
  CHECK(error(loss, expected) < (dtype == at::kDouble ? 1e-13 : 1e-6));
  for (int i = 0; i < 3; ++i) CHECK(error(gradients[i], expected_gradients[i]) < tolerance);
}

}  // namespace

TEST_CASE("linear_cross_entropy agrees with fp64 on every capability", "[linear_cross_entropy]") {
  const std::string before = shoestring::cpu_capability();
  for (const char* capability : {"plain", "avx2", "avx512"}) {
    if (!shoestring::set_cpu_capability(capability)) continue;
    for (const char* reduction : {"mean", "sum", "none"}) {
      LinearCrossEntropyOptions options;
      options.reduction(reduction).workspace_mb(1);
      // 1003 is no multiple of a register; 300 tokens of it are more than one chunk of 1 MiB.
      compare(300, 24, 1003, options, at::kFloat, 2e-6);
      compare(300, 24, 1003, options, at::kBFloat16, 4e-3);
      compare(5, 8, 17, options, at::kDouble, 1e-13);
      compare(300, 24, 1003, LinearCrossEntropyOptions(options).label_smoothing(0.1), at::kFloat, 2e-6);
      compare(300, 24, 1003, LinearCrossEntropyOptions(options).softcap(5), at::kFloat, 2e-6);
    }
  }
  shoestring::set_cpu_capability(before);
}

TEST_CASE("linear_cross_entropy refuses what does not fit", "[linear_cross_entropy]") {
  Tensor hidden = at::randn({4, 8}), weight = at::randn({10, 8}), target = at::zeros({4}, at::kLong);
  CHECK_THROWS_WITH(shoestring::linear_cross_entropy(hidden, at::randn({10, 9}), target),
                    Catch::Contains("weight: expected shape (vocab, 8)"));
  target[2] = 10;
  CHECK_THROWS_WITH(shoestring::linear_cross_entropy(hidden, weight, target),
                    Catch::Contains("target: expected classes in [0, "));
}
