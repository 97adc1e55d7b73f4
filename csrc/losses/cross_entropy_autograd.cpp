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
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, CrossEntropyProblem p,
                               const Alias& alias) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Reduction reduction(p);
    reduction.balance(p);
    const bool early = alias.replace && reduction.scalar;
    Tensor factor = reduction.factor(compute_type(logits));
    ctx->set_materialize_grads(false);
    Saved saved;
    saved.early = early;
    saved.replace = alias.replace;
    saved.logits = alias.logits;
    CrossEntropyResult r;
    if (early) {
      saved.known = enlargement(p);
      factor = factor.defined() ? factor * saved.known
                                : at::full({}, saved.known, logits.options().dtype(compute_type(logits)));
      r = p.rows({factor}, LogitsGradient::kInPlace);
      torch::autograd::impl::bump_version(logits);
    } else {
      r = p.rows({}, LogitsGradient::kNone);
      saved.again = {p.target, p.options, reduction.upstream(factor, p.stats ? r.lse : Tensor())};
    }
    save_fields(ctx, saved);
    variable_list results = reduction.results(p, r);
    if (p.stats) {
      ctx->mark_non_differentiable(early ? variable_list(results.begin() + 1, results.end())
                                         : variable_list{results[4], results[5]});
    }
    return results;
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
    TokenUpstream upstream;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit("target", self.target);
      visit_token_loss(self.options, visit);
      TokenUpstream::fields(self.upstream, visit);
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
  static double enlargement(const CrossEntropyProblem& p) {
    double known = 1;
    if (p.input.scalar_type() != at::kHalf || p.options.reduction() != "mean") return known;
    for (int64_t n = p.target.numel(); n > 1 && known < 0x1p15; n /= 2) known *= 2;
    return known;
  }

  static Tensor late(const Saved& saved, const variable_list& upstream) {
    const auto given =
        std::find_if(upstream.begin(), upstream.end(), [](const Tensor& t) { return t.defined(); });
    const bool replace = given != upstream.end() && used_once(*given) && !is_traced(saved.logits) &&
                         (saved.replace || is_unshared(saved.logits));
    at::AutoDispatchBelowADInplaceOrView below;
    CrossEntropyProblem p;
    p.input = saved.logits;
    p.target = saved.again->target;
    p.options = saved.again->options;
    const auto r = p.rows(saved.again->upstream.of_tokens(upstream, compute_type(p.input)),
                          replace ? LogitsGradient::kInPlace : LogitsGradient::kNew);
    if (replace) torch::autograd::impl::bump_version(saved.logits);
    return replace ? saved.logits : r.gradient;
  }
};

void cross_entropy_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto p = CrossEntropyProblem::read(op, *stack);
  const auto& token_weights = p.options.token_weights();
  if (!needs_grad(p.input) && !(token_weights && needs_grad(*token_weights))) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  p.make_readable();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    keep_hardest(p);
  }
  const Tensor logits = p.input;
  const Alias alias{logits.detach(), op.schema().name().back() == '_' && is_replaceable(logits)};
  variable_list results = p.record([&] {
    // The gradient edge of the logits must be read before the in-place change, because a changed view gets a
    // new grad_fn.
    const auto history = torch::autograd::impl::gradient_edge(logits);
    variable_list out = CrossEntropy::apply(logits, p, alias);
    if (!alias.replace || p.options.reduction() == "none") return out;
    auto refusal = make_node<torch::autograd::Error>(
        "cross_entropy: logits: inplace=True has replaced them by their gradient; use them before, or leave "
        "inplace out",
        torch::autograd::edge_list{history});
    refusal->add_input_metadata(logits);
    torch::autograd::impl::rebase_history(logits, {std::move(refusal), 0});
    return out;
  });
  replace_arguments<CrossEntropyProblem>(stack, std::move(results));
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  for (const char* name :
       {"cross_entropy", "cross_entropy_", "cross_entropy_with_stats", "cross_entropy_with_stats_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_autograd>());
  }
}

}  // namespace
}  // namespace shoestring::losses
