#include <ATen/ATen.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include "capabilities.h"
#include "catch.h"
#include "relative_error.h"

using at::Tensor;
using shoestring::LinearDistillationOptions;

namespace {

// Returns the Kullback-Leibler divergence KL(exp(p) || exp(q)) of each token, where p and q are
// log-probabilities.
Tensor kl(const Tensor& p, const Tensor& q) { return (p.exp() * (p - q)).sum(-1); }

// Computes the distillation loss as a reference: in fp64, with all logits in memory. The loss is the mean
// over all tokens except the first, which is ignored.
Tensor reference(const Tensor& logits, const Tensor& teacher_logits, const LinearDistillationOptions& o) {
  const Tensor p = at::log_softmax(logits / o.temperature(), -1);
  const Tensor q = at::log_softmax(teacher_logits / o.temperature(), -1);
  Tensor loss;
  if (o.divergence() == "forward_kl") {
    loss = kl(q, p);
  } else if (o.divergence() == "reverse_kl") {
    loss = kl(p, q);
  } else {
    const Tensor m = (o.beta() * q.exp() + (1 - o.beta()) * p.exp()).log();
    loss = o.beta() * kl(q, m) + (1 - o.beta()) * kl(p, m);
  }
  return loss.slice(0, 1).mean();
}

}  // namespace

TEST_CASE("linear_distillation agrees with fp64 on every capability", "[linear_distillation]") {
  at::manual_seed(7);
  // The logits need more than one chunk of 1 MiB, and 1003 is not a multiple of a vector register's width.
  const int64_t tokens = 300, vocab = 1003;
  for_each_capability([&](const char* capability) {
    for (const char* divergence : {"forward_kl", "reverse_kl", "jsd"}) {
      CAPTURE(capability, divergence);
      Tensor target = at::zeros({tokens}, at::kLong);
      target[0] = -7;
      auto options =
          LinearDistillationOptions().divergence(divergence).beta(0.3).temperature(2).target(target);
      options.ignore_index(-7).workspace_mb(1);
      Tensor hidden = at::randn({tokens, 24}).requires_grad_(),
             weight = at::randn({vocab, 24}).requires_grad_();
      Tensor bias = at::randn({vocab}).requires_grad_();
      const Tensor teacher_hidden = at::randn({tokens, 8}), teacher_weight = at::randn({vocab, 8});
      const Tensor teacher_bias = at::randn({vocab});
      Tensor loss = shoestring::linear_distillation(hidden, weight, teacher_hidden, teacher_weight, bias,
                                                    teacher_bias, options);
      const auto gradients = torch::autograd::grad({loss}, {hidden, weight, bias});

      std::vector<Tensor> exact;
      for (const Tensor& t : {hidden, weight, bias})
        exact.push_back(t.detach().to(at::kDouble).requires_grad_());
      const Tensor teacher_logits = at::linear(teacher_hidden.to(at::kDouble), teacher_weight.to(at::kDouble),
                                               teacher_bias.to(at::kDouble));
      Tensor expected = reference(at::linear(exact[0], exact[1], exact[2]), teacher_logits, options);
      const auto expected_gradients = torch::autograd::grad({expected}, exact);
      CHECK(relative_error(loss, expected) < 1e-6);
      for (int i = 0; i < 3; ++i) CHECK(relative_error(gradients[i], expected_gradients[i]) < 2e-6);
    }
  });
}

TEST_CASE("linear_distillation of 4-bit heads, the student's with an adapter", "[linear_distillation]") {
  at::manual_seed(8);
  const int64_t tokens = 40, vocab = 99;
  Tensor hidden = at::randn({tokens, 64}).requires_grad_(), bias = at::randn({vocab}).requires_grad_();
  Tensor lora_A = at::randn({4, 64}).requires_grad_(), lora_B = at::randn({vocab, 4}).requires_grad_();
  const Tensor teacher_hidden = at::randn({tokens, 32});
  const auto nf4 = shoestring::QuantizeOptions();
  const auto fp4 = shoestring::QuantizeOptions().quant_type("fp4").block_size(32);
  const auto [packed, scales] = shoestring::quantize_4bit(at::randn({vocab, 64}), nf4);
  const auto [absmax, nested] = shoestring::quantize_absmax(scales);
  const auto [teacher_packed, teacher_absmax] = shoestring::quantize_4bit(at::randn({vocab, 32}), fp4);

  auto options = LinearDistillationOptions().absmax(absmax).nested(nested).teacher_absmax(teacher_absmax);
  options.teacher_quant_type("fp4").teacher_block_size(32).temperature(2).target(
      at::ones({tokens}, at::kLong));
  options.lora_hidden(0.5 * hidden.matmul(lora_A.t())).lora_B(lora_B);
  (*options.target())[0] = -100;
  const Tensor loss =
      shoestring::linear_distillation(hidden, packed, teacher_hidden, teacher_packed, bias, {}, options);
  const auto gradients = torch::autograd::grad({loss}, {hidden, bias, lora_A, lora_B});

  std::vector<Tensor> exact;
  for (const Tensor& t : {hidden, bias, lora_A, lora_B})
    exact.push_back(t.detach().to(at::kDouble).requires_grad_());
  const Tensor weight = shoestring::dequantize_4bit(packed, absmax, {vocab, 64}, at::kFloat, nested, nf4);
  const Tensor teacher =
      shoestring::dequantize_4bit(teacher_packed, teacher_absmax, {vocab, 32}, at::kFloat, {}, fp4);
  const Tensor logits = at::linear(exact[0], weight.to(at::kDouble), exact[1]) +
                        0.5 * exact[0].matmul(exact[2].t()).matmul(exact[3].t());
  const Tensor expected = reference(logits, at::linear(teacher_hidden, teacher).to(at::kDouble), options);
  const auto expected_gradients = torch::autograd::grad({expected}, exact);
  CHECK(relative_error(loss, expected) < 1e-5);
  for (int i = 0; i < 4; ++i) CHECK(relative_error(gradients[i], expected_gradients[i]) < 1e-5);
}

TEST_CASE("linear_distillation refuses what does not fit", "[linear_distillation]") {
  const Tensor hidden = at::randn({4, 8}), weight = at::randn({10, 8}), teacher = at::randn({4, 3});
  CHECK_THROWS_WITH(shoestring::linear_distillation(hidden, weight, teacher, at::randn({9, 3})),
                    Catch::Contains("teacher_weight: expected shape (10, 3)"));
  CHECK_THROWS_WITH(shoestring::linear_distillation(hidden, weight, teacher, at::randn({10, 3}), {}, {},
                                                    LinearDistillationOptions().divergence("jsd").beta(0)),
                    Catch::Contains("beta: expected a number in (0, 1)"));
}
