#include "ops/composite.h"

#include <ATen/Functions.h>

namespace shoestring::optimizer {

Share::Share(const Call& call, const Stepped& s, const Tensor& before)
    : call(call),
      index(s.index),
      param(s.param),
      grad(s.grad),
      step(call.step.narrow(0, s.index, 1)),
      before(before.narrow(0, s.index, 1)),
      block_(s.block),
      blocks_(blocks_of(s.param)),
      total_(0) {
  for (const Tensor& p : call.params) total_ += blocks_of(p);
}

Tensor Share::of(const Tensor& arena) const {
  const int64_t per_block = total_ == 0 ? 0 : arena.numel() / total_;
  return arena.narrow(0, block_ * per_block, blocks_ * per_block);
}

OptionalTensor Share::of(const OptionalTensor& arena) const { return arena ? OptionalTensor(of(*arena)) : arena; }

Tensor Share::empty() const { return at::empty(param.sizes(), param.options().dtype(at::kFloat)); }

void Share::run(const char* op, const Tensor& result, const Tensor& grad, const Tensor& step,
                std::initializer_list<NamedArguments> arguments) const {
  NamedArguments all{{"params", std::vector<Tensor>{result}},
                     {"grads", c10::List<OptionalTensor>({grad})},
                     {"step", step},
                     {"found_inf", call.found_inf},
                     {"seed", call["seed"]},
                     {"position", call["position"].toInt() + block_}};
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

void Share::apply(const Tensor& update, NamedArguments own) const {
  run("apply_", param, update, step,
      {{{"lr", call["lr"]},
        {"lr_tensor", call.lr_tensor},
        {"weight_decay", call["weight_decay"]},
        {"weight_remainder", of(call.weight_remainder)},
        {"stochastic_rounding", call["stochastic_rounding"]}},
       std::move(own)});
}

std::vector<Share> shares(const Call& call, const std::vector<Moment>& moments) {
  std::vector<Share> found;
  const std::vector<Stepped> stepped = checked(call, moments);
  if (stepped.empty()) return found;
  const Tensor before = call.step.clone();
  for (const Stepped& s : stepped) found.emplace_back(call, s, before);
  return found;
}

}  // namespace shoestring::optimizer
