#include "optim/core/gradient_sums.h"

#include <algorithm>

#include <ATen/Functions.h>

namespace shoestring::optim::detail {

bool GradientSums::any_in(const Arena& arena) const {
  return any() &&
         std::any_of(arena.params.begin(), arena.params.end(), [&](const Tensor& p) { return has(p); });
}

void GradientSums::add(const Tensor& param) {
  const Tensor grad = param.grad();
  Tensor& sum = sums_[param.unsafeGetTensorImpl()];
  if (!sum.defined()) sum = at::zeros(grad.sizes(), grad.options().dtype(dtype));
  sum.add_(grad);
  note(param);
  param.mutable_grad() = Tensor();
}

void GradientSums::add_to_gradient(const Tensor& param) {
  Tensor& sum = of(param);
  if (!param.grad().defined()) param.mutable_grad() = at::zeros_like(param);
  param.mutable_grad().add_(sum.to(param.device()));
  sum.zero_();
  erase(param);
}

std::vector<Tensor> GradientSums::into(Arena& arena) {
  const auto views = arena.accumulated_views(dtype);
  for (size_t i = 0; i < views.size(); ++i) {
    Tensor& sum = sums_[arena.params[i].unsafeGetTensorImpl()];
    if (has(arena.params[i]) && !sum.is_alias_of(views[i])) views[i].copy_(sum);
    sum = views[i];
  }
  return views;
}

void GradientSums::end_step() {
  for (const Tensor& view : used_) view.zero_();
  used_.clear();
  pending_.clear();
}

void GradientSums::drop() {
  for (auto& [key, sum] : sums_) sum.zero_();
  end_step();
}

void GradientSums::forget() {
  sums_.clear();
  pending_.clear();
  used_.clear();
}

void GradientSums::follow(const std::unordered_map<Key, Tensor>& replaced) {
  detail::follow(sums_, replaced);
  std::unordered_set<Key> moved;
  for (const auto& [key, param] : replaced)
    if (pending_.erase(key) > 0) moved.insert(param.unsafeGetTensorImpl());
  pending_.merge(moved);
}

}  // namespace shoestring::optim::detail
