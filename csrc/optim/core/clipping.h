#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optim/core/arena.h"

namespace shoestring::optim::detail {

/// Returns the part of a parameter that this process holds.
Shard shard_of(const Tensor& param);

/// Reduces a number of this process over the process groups of a shard: the sum or the maximum ("max") over
/// all shards of a parameter.
Tensor over_groups(const Tensor& number, const Shard& shard, const char* how);

/// Tensors of this process, by the Shard that they have in common.
class ByShard {
 public:
  std::vector<Tensor>& operator[](const Shard& shard);
  bool empty() const { return entries_.empty(); }
  void clear() { entries_.clear(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<std::pair<Shard, std::vector<Tensor>>> entries_;
};

/// The norms of gradients of this process.
class Norms {
 public:
  bool empty() const { return norms_.empty(); }
  void clear() { norms_.clear(); }
  /// Adds the norm of a gradient of a parameter with this shard.
  void add(const Shard& shard, const Tensor& gradient);
  /// Adds a norm, a scalar.
  void add_norm(const Shard& shard, const Tensor& norm);
  /// Returns the norm of all gradients of all processes. Every process gets the same norm, since all of them
  /// call this function with the same groups in the same order.
  Tensor total() const;

 private:
  ByShard norms_;
};

/// Clips the gradients of a step to a norm.
struct Clipping {
  std::optional<double> max_norm{};
  Tensor norm{};      // of the gradients of the last step, before clipping; undefined without max_norm
  Norms in_backward;  // norms of the gradients that steps within backward have freed

  /// Sets `norm` to that of the gradients, which a loss scale has multiplied if grad_scale is defined.
  /// Returns the factor by which clipping multiplies the gradients; undefined without gradients. Needs
  /// max_norm. `known` has the norms of gradients by the address of their data.
  Tensor factor(const ByShard& gradients, const std::unordered_map<const void*, Tensor>& known,
                const Tensor& grad_scale);
};

}  // namespace shoestring::optim::detail
