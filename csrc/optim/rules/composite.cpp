#include "optim/rules/composite.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace shoestring::optim::ops {

Share::Share(const Call& call, const Stepped& s, const Tensor& before)
    : call(call), index(s.index), param(s.param), grad(s.grad), step(call.step.narrow(0, s.index, 1)),
      before(before.narrow(0, s.index, 1)), block_(s.block), blocks_(blocks_of(s.param)), total_(0) {
  for (const Tensor& p : call.params) total_ += blocks_of(p);
}

Tensor Share::of(const Tensor& arena) const {
  const int64_t per_block = total_ == 0 ? 0 : arena.numel() / total_;
  return arena.narrow(0, block_ * per_block, blocks_ * per_block);
}

OptionalTensor Share::of(const OptionalTensor& arena) const {
  return arena ? OptionalTensor(of(*arena)) : arena;
}

Tensor Share::empty() const { return at::empty(param.sizes(), param.options().dtype(at::kFloat)); }

Arguments Share::arguments(const LowMemoryOptions& options, const Tensor& result, const Tensor& grad,
                           const Tensor& step) const {
  Arguments inner(options);
  inner.params = {result};
  inner.grads = {grad};
  inner.step = step;
  inner.found_inf = call.found_inf;
  inner.seed = call.seed;
  inner.numbers = {call.number_of(index)};
  return inner;
}

void Share::pass_moments(Arguments& inner) const {
  for (size_t i = 0; i < call.moments.size(); ++i) {
    inner.moments[i].values = of(call.moments[i].values);
    inner.moments[i].scale = of(call.moments[i].scale);
  }
}

void Share::pass_gradient(Arguments& inner) const {
  inner.maximize = call.maximize;
  inner.grad_scale = call.grad_scale;
  inner.clip_coef = call.clip_coef;
  inner.accumulated = of(call.accumulated);
}

Tensor Share::gradient() const {
  Tensor g = grad.to(at::kFloat);
  if (call.accumulated) {
    Tensor sum = of(*call.accumulated);
    g = g + sum.narrow(0, 0, g.numel()).view(g.sizes());
    sum.zero_();
  }
  Tensor factor = call.clip_coef ? call.clip_coef->reshape({}) : Tensor();
  if (call.grad_scale)
    factor = (factor.defined() ? factor : at::ones({}, step.options())) / call.grad_scale->reshape({});
  if (factor.defined()) g = g * factor;
  return call.maximize ? g.neg() : g;
}

Tensor Share::weight() const {
  if (!call.weight_remainder || param.scalar_type() != at::kBFloat16) return param.to(at::kFloat);
  const Tensor lower = of(*call.weight_remainder).narrow(0, 0, param.numel()).view(param.sizes());
  return param.view(at::kShort).to(at::kInt).bitwise_left_shift_(16).add_(lower).view(at::kFloat);
}

Tensor Share::weight_norm() const {
  return at::linalg_vector_norm(call.weight_remainder ? weight() : param, 2, std::nullopt, false, at::kFloat);
}

void Share::advance(const Tensor& mean, const Tensor& fresh, const Tensor& weight) const {
  Tensor next = at::lerp(mean, fresh, weight);
  if (call.found_inf) next = at::where(call.found_inf->reshape({}) == 0, next, mean);
  mean.copy_(next);
}

void Share::apply(const Tensor& update, double weight_decay, const OptionalTensor& factor,
                  const OptionalTensor& lr, bool maximize) const {
  const auto options = ApplyOptions(call.lr).weight_decay(weight_decay);
  Arguments inner = arguments(options, param, update, step);
  inner.lr_tensor = lr ? lr : call.lr_tensor;
  inner.clip_coef = factor;
  inner.maximize = maximize;
  inner.weight_remainder = of(call.weight_remainder);
  inner.stochastic_rounding = call.stochastic_rounding;
  inner.call();
}

namespace {

void check_extra(const Call& call, const detail::Extra& extra, const std::vector<Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == call.params.size(), call.op, ": ", extra.name,
              ": expected one tensor for each of ", call.params.size(), " parameters, received ",
              tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto shape = extra.shape_of(call.params[i]);
    TORCH_CHECK(tensors[i].scalar_type() == at::kFloat && tensors[i].sizes() == shape &&
                    tensors[i].device() == call.params[i].device(),
                call.op, ": ", extra.name, "[", i, "]: expected an fp32 tensor of shape ",
                at::IntArrayRef(shape), " on ", call.params[i].device(), ", received ",
                tensors[i].scalar_type(), " ", tensors[i].sizes(), " on ", tensors[i].device());
  }
}

}  // namespace

std::vector<Share> shares(const Call& call) {
  for (size_t i = 0; i < call.extras.size(); ++i) check_extra(call, call.rule.extras[i], call.extras[i]);
  std::vector<Share> result;
  const std::vector<Stepped> stepped = checked(call);
  if (stepped.empty()) return result;
  TORCH_CHECK(call.is_whole(), call.op, ": blocks: expected None, received a part of a parameter");
  const Tensor before = call.step.clone();
  for (const Stepped& s : stepped) result.emplace_back(call, s, before);
  return result;
}

}  // namespace shoestring::optim::ops
