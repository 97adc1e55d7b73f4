#pragma once

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "optim/core/arena.h"

namespace shoestring::optim::detail {

/// The key under which LibTorch stores a parameter's optimizer state: the address of the parameter's
/// TensorImpl.
using Key = c10::TensorImpl*;

/// The gradients that accumulate() adds up over the micro-batches of a step, by parameter.
class GradientSums {
 public:
  at::ScalarType dtype = at::kFloat;

  /// Returns whether the sum of any parameter contains at least one micro-batch; of any in an arena; of one.
  bool any() const { return !pending_.empty(); }
  bool any_in(const Arena& arena) const;
  bool has(const Tensor& param) const { return pending_.count(param.unsafeGetTensorImpl()) > 0; }
  /// Returns whether any sum has memory, which it keeps from step to step.
  bool is_allocated() const { return !sums_.empty(); }

  /// Adds the gradient of a parameter to its sum, and frees the gradient.
  void add(const Tensor& param);
  /// Adds the sum of a parameter, which has() one, to its gradient, and sets the sum to zero.
  void add_to_gradient(const Tensor& param);
  /// Returns the sum of a parameter.
  Tensor& of(const Tensor& param) { return sums_.at(param.unsafeGetTensorImpl()); }
  /// Notes that the sum of a parameter contains a micro-batch, or that it contains none any more.
  void note(const Tensor& param) { pending_.insert(param.unsafeGetTensorImpl()); }
  void erase(const Tensor& param) { pending_.erase(param.unsafeGetTensorImpl()); }
  /// Moves the sums of an arena's parameters into the arena. Returns views of them.
  std::vector<Tensor> into(Arena& arena);

  /// Notes that a sum is a gradient of the current step, at the end of which it is set to zero.
  void use(const Tensor& sum) { used_.push_back(sum); }
  bool are_used() const { return !used_.empty(); }
  void end_step();
  /// Sets all sums to zero.
  void drop();
  /// Frees all sums.
  void forget();
  /// Gives the sums of parameters to the tensors that replace them.
  void follow(const std::unordered_map<Key, Tensor>& replaced);

 private:
  // The sum of each parameter; a view into an arena, once the arena exists.
  std::unordered_map<Key, Tensor> sums_;
  // Parameters whose sum contains at least one micro-batch.
  std::unordered_set<Key> pending_;
  // Sums that are gradients of the current step.
  std::vector<Tensor> used_;
};

/// Moves the values of replaced parameters to the tensors that replace them.
template <class Map>
void follow(Map& map, const std::unordered_map<Key, Tensor>& replaced) {
  Map moved;
  for (auto entry = map.begin(); entry != map.end();) {
    const auto replacement = replaced.find(static_cast<Key>(entry->first));
    if (replacement == replaced.end()) {
      ++entry;
      continue;
    }
    moved[replacement->second.unsafeGetTensorImpl()] = std::move(entry->second);
    entry = map.erase(entry);
  }
  for (auto& [key, value] : moved) map[key] = std::move(value);
}

}  // namespace shoestring::optim::detail
