// Linear cross-entropy whose classes are split into shards, one per process. Each process calls
// linear_cross_entropy_with_stats on its shard, with targets counted from the shard's first class.
// Elementwise arithmetic over the tokens combines the log-sum-exps and target logits of the shards.

#include <shoestring/losses/vocab_parallel.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "core/device.h"
#include "losses/head.h"
#include "losses/linear_cross_entropy.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

constexpr int64_t kIgnored = -100;
constexpr const char* kWhole = "vocab_parallel_linear_cross_entropy";

Tensor owned(const Tensor& target, int64_t first, const c10::SymInt& classes) {
  return target.ge(first).logical_and(target.lt(at::scalar_tensor(first + classes, target.options())));
}

// Implements linear_cross_entropy_shard and, if kLoss, _linear_cross_entropy_shard. If a token's target is in
// another shard, class 0 replaces it. The token's loss is then not used, and its log-sum-exp does not depend
// on the target.
template <bool kLoss>
void shard(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  using Call = LinearCrossEntropyShardCall<LinearCrossEntropyOptions>;
  auto call = read_fields<Call>(*stack);
  const Tensor& target = call.target;
  const int64_t first = call.first_class;
  const Tensor counted = target.ne(call.options.ignore_index());
  const auto vocab = vocab_of(call.hidden, call.weight, call.options.absmax().has_value());
  const Tensor here = owned(target, first, vocab).logical_and(counted);
  const Tensor local =
      target.sub(first).masked_fill(here.logical_not(), 0).masked_fill(counted.logical_not(), kIgnored);
  call.options.ignore_index(kIgnored).reduction("none");
  const auto stats =
      linear_cross_entropy_with_stats(call.hidden, call.weight, local, call.bias, call.options);
  torch::jit::drop(*stack, count_of<Call>());
  const Tensor of_target = kLoss ? stats.token_loss : stats.lse - stats.token_loss;
  torch::jit::push(*stack, stats.lse, of_target.masked_fill(here.logical_not(), 0));
}

TORCH_LIBRARY_IMPL(shoestring, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy_shard", torch::CppFunction::makeFromBoxedFunction<&shard<false>>());
  m.impl("_linear_cross_entropy_shard", torch::CppFunction::makeFromBoxedFunction<&shard<true>>());
}

// Returns an alias of x, a tensor that is the same on all processes. The gradient of the alias is summed over
// all processes, in fp32 (fp64 for fp64 gradients).
Tensor replicated(const Tensor& x, const AllReduce& all_reduce) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return x;
  Tensor alias = x.view_as(x);
  alias.register_hook([all_reduce](const Tensor& grad) {
    const auto wide = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor copy = grad.to(wide, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
    return all_reduce(copy, Reduce::kSum).to(grad.scalar_type());
  });
  return alias;
}

// Returns `sum`, the sum of x over processes. Every process computes the same loss from the sum and thus has
// the sum's whole gradient, which backward passes on to x.
class Summed : public torch::autograd::Function<Summed> {
 public:
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& /*x*/, const Tensor& sum) {
    return sum.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grad) {
    return {grad[0], Tensor()};
  }
};

// Raises unless each target that is not ignored belongs to the classes of exactly one process. Otherwise a
// target is out of range, or shards overlap.
void check_owners(const Tensor& owners, const Tensor& counted) {
  const Tensor right = owners.eq(counted).all();
  const std::string message = std::string(kWhole) +
                              ": target: expected each class to be one process's, received one that "
                              "is none's, or several's; check first_class";
  if (is_asynchronous(right)) {
    at::_assert_async(right, message);
  } else {
    TORCH_CHECK_INDEX(right.item<bool>(), message);
  }
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

LinearCrossEntropyShard linear_cross_entropy_shard(const Tensor& hidden, const Tensor& weight,
                                                   const Tensor& target, int64_t first_class,
                                                   const std::optional<Tensor>& bias,
                                                   const LinearCrossEntropyShardOptions& o) {
  using Call = losses::LinearCrossEntropyShardCall<LinearCrossEntropyShardOptions>;
  static const Operator<Call, losses::ShardResult> op("shoestring::linear_cross_entropy_shard");
  return op({hidden, weight, target, bias, first_class, o});
}

Tensor vocab_parallel_linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& given,
                                           int64_t first_class, const AllReduce& all_reduce,
                                           const std::optional<Tensor>& bias,
                                           const LinearCrossEntropyShardOptions& shard,
                                           const VocabParallelOptions& o) {
  losses::check_reduction(losses::kWhole, o.reduction());
  TORCH_CHECK(!o.token_weights() || o.token_weights()->sizes() == given.sizes(), losses::kWhole,
              ": token_weights: expected shape ", given.sizes(), ", received ", o.token_weights()->sizes());
  Tensor target = given;
  if (o.shift()) {
    TORCH_CHECK(
        given.dim() >= 1, losses::kWhole,
        ": shift: expected a sequence of tokens, received a single token without a sequence dimension");
    target = at::full_like(given, shard.ignore_index(), at::MemoryFormat::Contiguous);
    const int64_t count = given.size(-1);
    if (count > 1) target.narrow(-1, 0, count - 1).copy_(given.narrow(-1, 1, count - 1));
  }
  auto local = shard;
  if (shard.lora_hidden()) local.lora_hidden(losses::replicated(*shard.lora_hidden(), all_reduce));
  using Call = losses::LinearCrossEntropyShardCall<LinearCrossEntropyShardOptions>;
  static const Operator<Call, losses::ShardLoss> op("shoestring::_linear_cross_entropy_shard");
  const auto part = op({losses::replicated(hidden, all_reduce), weight, target, bias, first_class, local});

  const Tensor counted = target.ne(shard.ignore_index());
  const Tensor largest = all_reduce(part.lse.detach().clone(at::MemoryFormat::Contiguous), Reduce::kMax);
  const auto classes = losses::vocab_of(hidden, weight, shard.absmax().has_value());
  const Tensor here = losses::owned(target, first_class, classes).logical_and(counted);
  // The loss is the log-sum-exp of all shards minus the target's logit. All terms are differences to
  // `largest`, since the loss may be small compared with both.
  const Tensor from_largest = (largest - part.lse).masked_fill(here.logical_not(), 0) + part.target_loss;
  const Tensor mine = at::stack({(part.lse - largest).exp(), from_largest, here.to(largest.scalar_type())});
  const Tensor sums = losses::Summed::apply(mine, all_reduce(mine.detach().clone(), Reduce::kSum));
  losses::check_owners(sums[2].detach(), counted);
  const Tensor log_sum = sums[0].log(), lse = largest + log_sum;
  const Tensor token_loss =
      (log_sum + sums[1] + o.z_loss() * lse.square()).masked_fill(counted.logical_not(), 0);

  const auto type = lse.scalar_type();
  const Tensor each = o.token_weights() ? o.token_weights()->to(type).mul(counted) : counted.to(type);
  const Tensor loss = token_loss * each;
  if (o.reduction() == "none") return loss;
  return o.reduction() == "mean" ? loss.sum() / each.sum() : loss.sum();
}

}  // namespace shoestring
