#include "optim/core/clipping.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/core/foreach_norm.h"
#include "optim/core/norm.h"
#include "optim/split/all_reduce.h"

namespace shoestring::optim::detail {

Shard shard_of(const Tensor& param) {
  if (const SplitParameter* split = split_of(param)) return {split->groups, split->piece, split->device};
  return {};
}

Tensor over_groups(const Tensor& number, const Shard& shard, const char* how) {
  Tensor reduced = number.to(shard.device);
  for (const std::string& group : shard.groups) reduced = all_reduce(reduced, how, group);
  return reduced;
}

std::vector<Tensor>& ByShard::operator[](const Shard& shard) {
  const auto same =
      std::find_if(entries_.begin(), entries_.end(), [&](const auto& entry) { return entry.first == shard; });
  return same != entries_.end() ? same->second : entries_.emplace_back(shard, std::vector<Tensor>()).second;
}

void Norms::add(const Shard& shard, const Tensor& gradient) {
  add_norm(shard, ops::foreach_norm({gradient})[0]);
}

void Norms::add_norm(const Shard& shard, const Tensor& norm) {
  constexpr size_t kMost = 1024;
  auto& some = norms_[shard];
  some.push_back(norm);
  if (some.size() >= kMost) some = {at::linalg_vector_norm(at::stack(some))};
}

Tensor Norms::total() const {
  std::vector<Tensor> whole;
  for (const auto& [shard, some] : norms_) {
    std::vector<Tensor> here;
    for (const Tensor& norm : some) here.push_back(norm.to(some[0].device()));
    const Tensor norm = here.size() == 1 ? here[0] : at::linalg_vector_norm(at::stack(here));
    whole.push_back(shard.groups.empty() ? norm : over_groups(norm.square(), shard, "sum").sqrt());
  }
  if (whole.size() == 1) return whole[0];
  for (Tensor& norm : whole) norm = norm.to(whole[0].device());
  return at::linalg_vector_norm(at::stack(whole));
}

Tensor Clipping::factor(const ByShard& gradients, const std::unordered_map<const void*, Tensor>& known,
                        const Tensor& grad_scale) {
  if (gradients.empty()) return {};
  // The gradients of one Shard have one norm, so that each group of processes communicates once.
  Norms norms;
  for (const auto& [shard, some] : gradients) norms.add_norm(shard, total_norm(some, known));
  norm = norms.total();
  if (grad_scale.defined()) norm = norm / grad_scale.to(norm.device()).squeeze();
  return clip_coef(norm, *max_norm);
}

}  // namespace shoestring::optim::detail
