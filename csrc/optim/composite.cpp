#include "optim/composite.h"

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

void Share::run(const char* op, const Tensor& result, const Tensor& grad, const Tensor& step,
                std::initializer_list<NamedArguments> arguments) const {
  NamedArguments all{{"params", std::vector<Tensor>{result}},
                     {"grads", c10::List<OptionalTensor>({grad})},
                     {"step", step},
                     {"found_inf", call.found_inf},
                     {"seed", call["seed"]},
                     {"numbers", std::vector<int64_t>{call.number_of(index)}}};
  for (const NamedArguments& some : arguments) all.insert(all.end(), some.begin(), some.end());
  call_by_name(std::string("shoestring::") + op, all);
}

NamedArguments Share::moment(const std::string& theirs, const Moment& moment) const {
  return {{theirs, of(moment.values)}, {theirs + "_scale", of(moment.scale)}};
}

NamedArguments Share::of_gradient() const {
  return {{"maximize", call["maximize"]},
          {"grad_scale", call.grad_scale},
          {"clip_coef", call.clip_coef},
          {"accumulated", of(call.accumulated)}};
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
  return call["maximize"].toBool() ? g.neg() : g;
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

void Share::apply(const Tensor& update, const OptionalTensor& factor, const OptionalTensor& lr,
                  bool maximize) const {
  run("_apply_", param, update, step,
      {{{"lr", call["lr"]},
        {"lr_tensor", lr ? lr : call.lr_tensor},
        {"weight_decay", call["weight_decay"]},
        {"clip_coef", factor},
        {"maximize", maximize},
        {"weight_remainder", of(call.weight_remainder)},
        {"stochastic_rounding", call["stochastic_rounding"]}}});
}

std::vector<Tensor> extra(const Call& call, const char* name, ShapeOf shape_of) {
  const auto tensors = call[name].toTensorVector();
  TORCH_CHECK(tensors.size() == call.params.size(), call.op, ": ", name, ": expected one tensor for each of ",
              call.params.size(), " parameters, received ", tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto shape = shape_of(call.params[i]);
    TORCH_CHECK(tensors[i].scalar_type() == at::kFloat && tensors[i].sizes() == shape &&
                    tensors[i].device() == call.params[i].device(),
                call.op, ": ", name, "[", i, "]: expected an fp32 tensor of shape ", at::IntArrayRef(shape),
                " on ", call.params[i].device(), ", received ", tensors[i].scalar_type(), " ",
                tensors[i].sizes(), " on ", tensors[i].device());
  }
  return tensors;
}

std::vector<Share> shares(const Call& call, const std::vector<Moment>& moments) {
  std::vector<Share> found;
  const std::vector<Stepped> stepped = checked(call, moments);
  if (stepped.empty()) return found;
  TORCH_CHECK(call.is_whole(), call.op, ": blocks: expected None, received a part of a parameter");
  const Tensor before = call.step.clone();
  for (const Stepped& s : stepped) found.emplace_back(call, s, before);
  return found;
}

}  // namespace shoestring::optim::ops
