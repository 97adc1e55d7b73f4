#include <ATen/ATen.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.h"
#include "relative_error.h"

using at::Tensor;
using shoestring::LinearDistillationOptions;

TEST_CASE("linear_distillation of 4-bit heads, the student's with an adapter", "[linear_distillation]") {
  at::manual_seed(8);
  const int64_t tokens = 40, vocab = 99;
  Tensor hidden = at::randn({tokens, 64}).requires_grad_(), bias = at::randn({vocab}).requires_grad_();
  Tensor lora_A = at::randn({4, 64}).requires_grad_(), lora_B = at::randn({vocab, 4}).requires_grad_();
  const Tensor teacher_hidden = at::randn({tokens, 32}), teacher_bias = at::randn({vocab});
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
  const Tensor loss = shoestring::linear_distillation(hidden, packed, teacher_hidden, teacher_packed, bias,
                                                      teacher_bias, options);
  const auto gradients = torch::autograd::grad({loss}, {hidden, bias, lora_A, lora_B});

  std::vector<Tensor> exact;
  for (const Tensor& t : {hidden, bias, lora_A, lora_B})
    exact.push_back(t.detach().to(at::kDouble).requires_grad_());
  const Tensor weight = shoestring::dequantize_4bit(packed, absmax, {vocab, 64}, at::kFloat, nested, nf4);
  const Tensor teacher =
      shoestring::dequantize_4bit(teacher_packed, teacher_absmax, {vocab, 32}, at::kFloat, {}, fp4);
  const Tensor logits = at::linear(exact[0], weight.to(at::kDouble), exact[1]) +
                        0.5 * exact[0].matmul(exact[2].t()).matmul(exact[3].t());
  const Tensor p = at::log_softmax(logits / 2, -1);
  const Tensor q = at::log_softmax(at::linear(teacher_hidden, teacher, teacher_bias).to(at::kDouble) / 2, -1);
  const Tensor expected = (q.exp() * (q - p)).sum(-1).slice(0, 1).mean();
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
