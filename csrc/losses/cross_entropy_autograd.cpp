#include "losses/cross_entropy.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>

#include "core/autograd.h"
#include "core/tensors.h"

namespace shoestring::losses {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns whether the gradient may overwrite the logits. It may if autograd detects every later use of them:
// nodes that have saved the logits compare version counters, and any other use goes through the new grad_fn
// of the logits, which raises in backward.
bool is_replaceable(const Tensor& logits) {
  using torch::autograd::can_mutate_inplace;
  // torch.compile and other tracers plan memory themselves
  if (is_traced(logits) || !logits.requires_grad()) return false;
  const bool allowed =
      can_mutate_inplace(logits, true) == torch::autograd::can_mutate_inplace_result::success;
  if (!allowed || !logits.has_storage() || logits.retains_grad()) return false;
  return !(logits.is_view() && logits._base().retains_grad()) && writable(logits);
}

// Returns whether nothing but autograd's saved variable still refers to the memory of `saved`, so that a
// gradient may overwrite it.
bool is_unshared(const Tensor& saved) {
  constexpr size_t kHere = 2;  // expected number of references: one by the saved variable, one by `saved`
  return saved.has_storage() && saved.use_count() == kHere && saved.storage().use_count() == 1 &&
         writable(saved);
}

// Computes x *= upstream in place. If x is not contiguous but its slices x[i] are, multiplies slice by slice.
Tensor scaled_gradient(const Tensor& x, const Tensor& upstream) {
  if (x.is_contiguous() || !used_once(upstream)) return scale_gradient(x, upstream);
  if (x.dim() < 3 || !x.select(0, 0).is_contiguous()) return x.mul_(upstream);
  for (const Tensor& part : x.unbind(0)) scale_gradient(part, upstream);
  return x;
}

struct Alias {
  Tensor logits;
  bool replace;  // whether the gradient may overwrite the logits
};

// The autograd function of cross_entropy. If the gradient may overwrite the logits and the result is a
// scalar, forward computes the gradient in place. This saves a second read of the logits. Otherwise backward
// computes the gradient, so that it occupies no memory in between. In backward, the gradient overwrites the
// logits if nothing else refers to them.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  // `alias` holds a detached alias of the logits. Only autograd refers to the alias, so its reference count
  // does not include the caller's references.
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, CrossEntropyCall call,
                               const Alias& alias) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Reduction reduction(call);
    reduction.balance(call);
    const bool early = alias.replace && reduction.scalar;
    Tensor factor = reduction.factor(compute_type(logits));
    ctx->set_materialize_grads(false);
    Saved saved;
    saved.early = early;
    saved.replace = alias.replace;
    saved.logits = alias.logits;
    CrossEntropyResult r;
    if (early) {
      saved.known = enlargement(call);
      factor = factor.defined() ? factor * saved.known
                                : at::full({}, saved.known, logits.options().dtype(compute_type(logits)));
      r = cross_entropy_rows(call, {factor}, LogitsGradient::kInPlace);
      torch::autograd::impl::bump_version(logits);
    } else {
      r = cross_entropy_rows(call, {}, LogitsGradient::kNone);
      const bool balanced = reduction.share.defined() && call.stats;
      saved.again = {call.target, call.options, factor, balanced ? reduction.share : Tensor(),
                     balanced ? reduction.slope_of_z(r.lse) : Tensor()};
    }
    save_fields(ctx, saved);
    const Tensor loss = reduction.apply(r.loss);
    if (!call.stats) return {loss};
    r.loss = reduction.original(r.loss, r.lse);
    const Tensor correct = count_correct(r.argmax, call.target);
    ctx->mark_non_differentiable(early ? variable_list{r.loss, r.lse, r.entropy, r.argmax, correct}
                                       : variable_list{r.argmax, correct});
    return {loss, r.loss, r.lse, r.entropy, r.argmax, correct};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list gradients(3);
    const auto saved = saved_fields<Saved>(ctx);
    if (saved.early) {
      at::NoGradGuard no_grad;
      if (upstream[0].defined())
        gradients[0] =
            scaled_gradient(saved.logits, saved.known == 1 ? upstream[0] : upstream[0] / saved.known);
    } else {
      gradients[0] = late(saved, upstream);
    }
    gradients[0] = once_differentiable(kCrossEntropyOp, {gradients[0]})[0];
    return gradients;
  }

 private:
  // The values from which backward computes the gradient, unless forward has computed it.
  struct Again {
    Tensor target;
    LinearCrossEntropyOptions options;
    Tensor factor, share, slope;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit("target", self.target);
      visit_token_loss(self.options, visit);
      visit("factor", self.factor);
      visit("share", self.share);
      visit("slope", self.slope);
    }
  };
  struct Saved {
    Tensor logits;
    // early: whether forward has replaced the logits by their gradient, multiplied by `known`. replace:
    // whether the gradient may overwrite the logits.
    bool early = false, replace = false;
    double known = 1;
    std::optional<Again> again;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit("logits", self.logits);
      visit("early", self.early);
      visit("replace", self.replace);
      visit("known", self.known);
      visit.maybe(self.again);
    }
  };

  // Returns the factor by which forward multiplies the gradient of the logits, and by which backward divides
  // it again. In fp16 the gradients of a mean, about 1 / tokens, would be too small. For them the factor is a
  // power of two near the number of tokens, otherwise 1.
  static double enlargement(const CrossEntropyCall& call) {
    double known = 1;
    if (call.input.scalar_type() != at::kHalf || call.options.reduction() != "mean") return known;
    for (int64_t n = call.target.numel(); n > 1 && known < 0x1p15; n /= 2) known *= 2;
    return known;
  }

  static Tensor late(const Saved& saved, const variable_list& upstream) {
    const auto given =
        std::find_if(upstream.begin(), upstream.end(), [](const Tensor& t) { return t.defined(); });
    const bool replace = given != upstream.end() && used_once(*given) && !is_traced(saved.logits) &&
                         (saved.replace || is_unshared(saved.logits));
    at::AutoDispatchBelowADInplaceOrView below;
    CrossEntropyCall call;
    call.input = saved.logits;
    call.target = saved.again->target;
    call.options = saved.again->options;
    const auto balanced =
        balanced_upstream(upstream, saved.again->share, saved.again->slope, call.options.z_loss());
    const auto gradient = upstream_of_tokens(balanced, saved.again->factor, compute_type(call.input));
    const auto r =
        cross_entropy_rows(call, gradient, replace ? LogitsGradient::kInPlace : LogitsGradient::kNew);
    if (replace) torch::autograd::impl::bump_version(saved.logits);
    return replace ? saved.logits : r.gradient;
  }
};

template <bool kStats>
void cross_entropy_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CrossEntropyCall call(*stack, kStats);
  LinearCrossEntropyOptions& o = call.options;
  const bool weighted = o.token_weights() && needs_grad(*o.token_weights());
  const bool in_place = op.schema().name().back() == '_';
  if (!weighted && !needs_grad(call.input)) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  call.make_readable();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    keep_hardest(call);
  }
  std::optional<Reduction> reduction;
  // Token weights that require a gradient are applied by plain autograd operations. The autograd function is
  // therefore called without them and with reduction='none'. These operations also need each token's lse if
  // Reduction::share is defined, i.e. for a mean with class weights and z_loss.
  if (weighted) {
    reduction.emplace(call);
    o.token_weights(std::nullopt).reduction("none");
    call.stats |= reduction->share.defined();
  }
  const Tensor logits = call.input;
  const Alias alias{logits.detach(), in_place && is_replaceable(logits)};
  // The gradient edge of the logits must be read before the in-place change, because a changed view gets a
  // new grad_fn.
  const auto history = torch::autograd::impl::gradient_edge(logits);
  variable_list out = CrossEntropy::apply(logits, call, alias);
  if (alias.replace && o.reduction() != "none") {
    auto refusal = make_node<torch::autograd::Error>(
        "cross_entropy: logits: inplace=True has replaced them by their gradient; use them before, or leave "
        "inplace out",
        torch::autograd::edge_list{history});
    refusal->add_input_metadata(logits);
    torch::autograd::impl::rebase_history(logits, {std::move(refusal), 0});
  }
  if (reduction) out[0] = reduction->apply(call.stats ? reduction->balanced(out[0], out[2]) : out[0]);
  if (!kStats) out.resize(1);
  torch::jit::drop(*stack, count_of<CrossEntropyArguments<CrossEntropyOptions>>());
  for (Tensor& t : out) torch::jit::push(*stack, std::move(t));
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  for (const char* name : {"cross_entropy", "cross_entropy_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_autograd<false>>());
  }
  for (const char* name : {"cross_entropy_with_stats", "cross_entropy_with_stats_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_autograd<true>>());
  }
}

}  // namespace
}  // namespace shoestring::losses
