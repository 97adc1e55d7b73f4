// Tests optimizer steps with gradients of a scaled loss, as torch.amp.GradScaler does them in Python.

#include "catch.h"

#include <limits>

#include <torch/csrc/autograd/autograd.h>

#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

constexpr double kScale = 1024;  // loss scale; a power of two, so that scaling does not round

std::vector<Tensor> everything(LowMemoryOptimizer& opt, const std::vector<Tensor>& params) {
  std::vector<Tensor> all;
  for (const Tensor& p : params) {
    all.push_back(p.detach().clone());
    for (const auto& [name, tensor] : state_of(opt, p).tensors()) all.push_back(tensor.clone());
  }
  return all;
}

void scale_gradients(const std::vector<Tensor>& params, double scale) {
  for (const Tensor& p : params) p.mutable_grad().mul_(scale);
}

}  // namespace

TEST_CASE("a scaled step is the step", "[optim]") {
  for (const RuleCase& rule : rule_cases()) {
    for (const std::string state : {"8bit", "fp32"}) {
      for (auto dtype : {at::kFloat, at::kHalf}) {
        for (bool clip : {false, true}) {
          CAPTURE(rule.name, state, dtype, clip);
          const auto ours = matrices(dtype), theirs = matrices(dtype);
          const auto opt = rule.make(two_groups(ours), state, "nearest");
          const auto other = rule.make(two_groups(theirs), state, "nearest");
          if (clip) opt->set_max_grad_norm(0.5);
          if (clip) other->set_max_grad_norm(0.5);
          for (int step = 0; step < 3; ++step) {
            new_gradients(theirs, step);
            other->step();
            new_gradients(ours, step);
            scale_gradients(ours, kScale);
            const Tensor before = ours[1].grad().clone();
            CHECK(opt->scaled_step(number(kScale)).item<float>() == 0);
            CHECK(at::equal(ours[1].grad(), before));
            if (clip) CHECK(at::equal(opt->grad_norm(), other->grad_norm()));
          }
          CHECK(equal(everything(*opt, ours), everything(*other, theirs)));
          new_gradients(ours, 3);  // after scaled steps, a step without a scale uses gradients as they are
          new_gradients(theirs, 3);
          opt->step();
          other->step();
          CHECK(equal(ours, theirs));
        }
      }
    }
  }
}

TEST_CASE("a gradient that is not finite skips the step for all parameters, and leaves everything",
          "[optim]") {
  const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN()};
  for (const RuleCase& rule : rule_cases()) {
    for (const char* state : kStates) {
      for (bool clip : {false, true}) {
        CAPTURE(rule.name, state, clip);
        const auto params = matrices();
        const auto opt = rule.make(two_groups(params), state, "nearest");
        if (clip) opt->set_max_grad_norm(0.5);
        train(*opt, params, 0, 2);
        const auto before = everything(*opt, params);
        for (const float x : bad) {
          new_gradients(params, 2);
          params[2].mutable_grad().view(-1)[4321] = x;
          CHECK(opt->scaled_step(number(kScale)).item<float>() == 1);
          CHECK(equal(everything(*opt, params), before));
        }
        new_gradients(params, 2);
        // A nonzero found_inf of the caller skips the step, although all gradients are finite.
        CHECK(opt->scaled_step(number(kScale), number(1)).item<float>() == 1);
        CHECK(equal(everything(*opt, params), before));
        // The same without a scale: the step then looks at found_inf alone.
        CHECK(opt->scaled_step({}, number(1)).item<float>() == 1);
        CHECK(equal(everything(*opt, params), before));
        CHECK(opt->scaled_step(number(kScale), at::zeros({1})).item<float>() == 0);
        CHECK(!equal(everything(*opt, params), before));
      }
    }
  }
}

TEST_CASE("a step with a flag and no scale is the step", "[optim]") {
  for (const RuleCase& rule : rule_cases()) {
    CAPTURE(rule.name);
    const auto ours = matrices(), theirs = matrices();
    const auto opt = rule.make(two_groups(ours), "8bit", "nearest");
    const auto other = rule.make(two_groups(theirs), "8bit", "nearest");
    for (int step = 0; step < 3; ++step) {
      new_gradients(ours, step);
      new_gradients(theirs, step);
      CHECK(opt->scaled_step({}, number(0)).item<float>() == 0);
      other->step();
    }
    CHECK(equal(everything(*opt, ours), everything(*other, theirs)));
  }
}

TEST_CASE("gradients that are finite are not taken for others", "[optim]") {
  const Tensor p = at::zeros({300}).requires_grad_();
  AdamW opt({p});
  p.mutable_grad() = at::full({300}, 3e38);  // the gradients are finite, but their squares overflow
  CHECK(opt.scaled_step(number(1e30)).item<float>() == 0);
  CHECK(p.count_nonzero().item<int64_t>() == 300);
  p.mutable_grad() = Tensor();
  // no parameter has a gradient, so scaled_step() reports no infinite gradient
  CHECK(opt.scaled_step(number(1)).item<float>() == 0);
}

TEST_CASE("sums of micro-batches are scaled, looked at, and dropped", "[optim]") {
  const auto params = parameters(), whole = parameters();
  AdamW opt(two_groups(params)), other(two_groups(whole));
  const auto backward = [&](double factor) {
    Tensor loss = at::zeros({});
    for (const Tensor& p : params) loss = loss + (p * factor).sum();
    torch::autograd::backward({loss}, {});
  };
  const auto step = [&](double first, double second) {
    {
      const auto micro = opt.accumulate();
      backward(first);
    }
    backward(second);
    const Tensor found = opt.scaled_step(number(kScale));
    opt.zero_grad();
    return found.item<float>();
  };
  for (const Tensor& p : whole) p.mutable_grad() = at::full_like(p, 0.75);
  other.step();
  CHECK(step(0.5 * kScale, 0.25 * kScale) == 0);
  CHECK(equal(params, whole));
  CHECK(step(std::numeric_limits<double>::infinity(), 1) == 1);
  CHECK(equal(params, whole));
  other.step();
  // the skipped step has dropped the accumulated sum, which was infinite
  CHECK(step(0.5 * kScale, 0.25 * kScale) == 0);
  CHECK(equal(params, whole));
}

TEST_CASE("the scale falls after a skipped step and rises after others", "[optim]") {
  const Tensor p = at::ones({300}, at::kHalf).requires_grad_();
  AdamW opt({p});
  Tensor scale = number(65536), tracker = at::zeros({}, at::kInt);
  std::vector<double> scales;
  for (int step = 0; step < 6; ++step) {
    opt.zero_grad();
    torch::autograd::backward({(p.to(at::kFloat) * 2).sum() * scale}, {});
    at::_amp_update_scale_(scale, tracker, opt.scaled_step(scale), 2.0, 0.5, 2);
    scales.push_back(scale.item<double>());
  }
  // The gradients are twice the loss scale. With a scale of 32768 or more they overflow fp16, and the scale
  // is halved.
  CHECK(scales == std::vector<double>{32768, 16384, 16384, 32768, 16384, 16384});
  CHECK(state_of(opt, p)["step"].item<float>() == 3);
}

TEST_CASE("what is no scale is refused", "[optim]") {
  AdamW opt(parameters());
  CHECK_THROWS_WITH(opt.scaled_step({}),
                    Contains("AdamW: grad_scale: expected one fp32 number, received none"));
  CHECK_THROWS_WITH(opt.scaled_step(at::ones({2})),
                    Contains("AdamW: grad_scale: expected one fp32 number, received Float of shape [2]"));
  CHECK_THROWS_WITH(opt.scaled_step(at::ones({}), at::ones({}, at::kBool)),
                    Contains("AdamW: found_inf: expected one fp32 number, or none, received Bool"));
  opt.set_step_in_backward(true);
  CHECK_THROWS_WITH(opt.scaled_step(at::ones({})),
                    Contains("AdamW: scaled_step: expected an optimizer without step_in_backward"));
}
