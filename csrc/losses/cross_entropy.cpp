#include "losses/cross_entropy.h"

#include <ATen/Functions.h>
#include <shoestring/ops.h>
#include <torch/library.h>

#include "core/huge_pages.h"
#include "core/tensors.h"

namespace shoestring::losses {
namespace {

// Pushes the loss, lse, entropy and argmax of each row to the stack of a boxed call. _cross_entropy_rows and
// _cross_entropy_rows_ both return them. The caller pushes the gradient of the logits, which only
// _cross_entropy_rows returns.
void push_cross_entropy_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                             const CrossEntropyProblem& p, const RowsResult& r) {
  const auto compute = p.logits.options().dtype(compute_type(p.logits));
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, r.loss, r.lse, r.entropy.defined() ? r.entropy : at::empty({0}, compute),
                   r.argmax.defined() ? r.argmax : at::empty({0}, compute.dtype(at::kLong)));
}

// Returns (size, stride) pairs that describe all dimensions of the logits except for the last, the classes.
// The innermost pair comes first. Adjacent dimensions are merged where one stride covers both.
std::vector<std::pair<int64_t, int64_t>> strides_of_tokens(const Tensor& logits) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (int64_t d = logits.dim() - 2; d >= 0; --d) {
    if (logits.size(d) == 1) continue;
    if (!found.empty() && logits.stride(d) == found.back().first * found.back().second) {
      found.back().first *= logits.size(d);
    } else {
      found.emplace_back(logits.size(d), logits.stride(d));
    }
  }
  return found;
}

}  // namespace

std::optional<LogitsLayout> layout_of(const Tensor& logits) {
  if (logits.numel() == 0) return LogitsLayout{};
  const auto strides = strides_of_tokens(logits);
  if ((logits.stride(-1) != 1 && logits.size(-1) != 1) || strides.size() > 2) return std::nullopt;
  LogitsLayout found;
  if (!strides.empty()) std::tie(found.inner, found.inner_stride) = strides[0];
  if (strides.size() == 2) std::tie(found.outer, found.outer_stride) = strides[1];
  return found;
}

bool writable(const Tensor& logits) {
  const auto found = layout_of(logits);
  if (!found) return false;
  std::pair<int64_t, int64_t> near{found->inner, found->inner_stride}, far{found->outer, found->outer_stride};
  if (far.first > 1 && far.second < near.second) std::swap(near, far);
  return (near.first == 1 || near.second >= logits.size(-1)) &&
         (far.first == 1 || far.second >= (near.first - 1) * near.second + logits.size(-1));
}

CrossEntropyProblem::CrossEntropyProblem(const BoxedArguments& a)
    : RowsProblem(kCrossEntropyOp, a, a.tensor("logits"), a.tensor("logits").sym_size(-1)),
      logits(a.tensor("logits")) {
  check_tokens(kCrossEntropyOp, "logits", "vocab", logits, target);
  TORCH_CHECK(target.device() == logits.device(), kCrossEntropyOp, ": target: expected logits' device, ",
              logits.device(), ", received ", target.device());
}

void run_cross_entropy_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack, CrossEntropyRun run) {
  const BoxedArguments arguments(op, *stack);
  CrossEntropyProblem p(arguments);
  if (arguments["gradient"].toBool()) {
    p.gradient = in_huge_pages(at::empty(p.logits.sizes(), p.logits.options()));
    p.gradient_layout = *layout_of(p.gradient);
  }
  if (!layout_of(p.logits)) p.logits = p.logits.contiguous();
  p.layout = *layout_of(p.logits);
  push_cross_entropy_rows(stack, op, p, run(p));
  torch::jit::push(*stack, p.gradient.defined() ? p.gradient : at::empty({0}, p.logits.options()));
}

void run_cross_entropy_rows_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                                     CrossEntropyRun run) {
  CrossEntropyProblem p(BoxedArguments(op, *stack));
  TORCH_CHECK(writable(p.logits), kCrossEntropyOp,
              "_rows_: logits: expected contiguous classes, tokens in at most two strides and no overlapping "
              "memory, received strides ",
              p.logits.strides(), " of ", p.logits.sizes());
  p.gradient = p.logits;
  p.layout = p.gradient_layout = *layout_of(p.logits);
  push_cross_entropy_rows(stack, op, p, run(p));
}

CrossEntropyCall::CrossEntropyCall(const BoxedArguments& a, bool stats)
    : TokenCall(kCrossEntropyOp, a, a.tensor("logits"),
                a.tensor("logits").dim() == 0 ? 1 : a.tensor("logits").sym_size(-1), stats) {
  for (const char* name : kCrossEntropyOptions) options.emplace_back(name, a[name]);
}

CrossEntropyResult cross_entropy_rows(const CrossEntropyCall& call, const std::array<Tensor, 3>& upstream,
                                      LogitsGradient gradient) {
  const auto optional = [](const Tensor& t) { return t.defined() ? c10::IValue(t) : c10::IValue(); };
  NamedArguments arguments = call.options;
  arguments.insert(arguments.end(), {{"logits", call.input},
                                     {"target", call.target},
                                     {"class_weights", call.class_weights},
                                     {"grad_loss", optional(upstream[0])},
                                     {"grad_lse", optional(upstream[1])},
                                     {"grad_entropy", optional(upstream[2])},
                                     {"stats", call.stats}});
  const bool in_place = gradient == LogitsGradient::kInPlace;
  if (!in_place) arguments.emplace_back("gradient", gradient == LogitsGradient::kNew);
  const auto out = call_by_name(
      in_place ? "shoestring::_cross_entropy_rows_" : "shoestring::_cross_entropy_rows", arguments);
  const auto result = [&](int i, bool wanted) { return wanted ? out[i].toTensor() : Tensor(); };
  return {{result(0, true), result(1, true), result(2, call.stats), result(3, call.stats)},
          result(4, gradient == LogitsGradient::kNew)};
}

namespace {

using at::Tensor;

RowsResult cross_entropy_rows_on_meta(const CrossEntropyProblem& p) {
  const auto compute = p.logits.options().dtype(compute_type(p.logits));
  const auto each = [&](at::TensorOptions options) {
    return at::empty_symint(p.target.sym_sizes(), options);
  };
  return {each(compute), each(compute), p.stats ? each(compute) : Tensor(),
          p.stats ? each(compute.dtype(at::kLong)) : Tensor()};
}

void cross_entropy_rows_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const BoxedArguments arguments(op, *stack);
  const CrossEntropyProblem p(arguments);
  const bool functional = arguments.has("gradient"), gradient = functional && arguments["gradient"].toBool();
  push_cross_entropy_rows(stack, op, p, cross_entropy_rows_on_meta(p));
  if (!functional) return;
  torch::jit::push(*stack, gradient ? at::empty_symint(p.logits.sym_sizes(), p.logits.options())
                                    : at::empty({0}, p.logits.options()));
}

// Implements the four cross_entropy operators for calls that need no gradient. One implementation serves
// every device. The in-place variants, whose names end in _, do not change the logits here.
template <bool kStats>
void cross_entropy_without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CrossEntropyCall call(BoxedArguments(op, *stack), kStats);
  keep_hardest(call);
  const Reduction reduction(call);
  reduction.balance(call);
  const auto r = cross_entropy_rows(call, {}, LogitsGradient::kNone);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, reduction.apply(r.loss));
  if constexpr (kStats)
    torch::jit::push(*stack, reduction.original(r.loss, r.lse), r.lse, r.entropy, r.argmax);
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_cross_entropy_rows", torch::CppFunction::makeFromBoxedFunction<&cross_entropy_rows_meta>());
  m.impl("_cross_entropy_rows_", torch::CppFunction::makeFromBoxedFunction<&cross_entropy_rows_meta>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  for (const char* name : {"cross_entropy", "cross_entropy_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_without_gradients<false>>());
  }
  for (const char* name : {"cross_entropy_with_stats", "cross_entropy_with_stats_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_without_gradients<true>>());
  }
}

torch::jit::Stack call_cross_entropy(const std::string& op, const Tensor& logits, const Tensor& target,
                                     const CrossEntropyOptions& o) {
  return call_by_name(o.inplace() ? op + "_" : op, {{"logits", logits},
                                                    {"target", target},
                                                    {"ignore_index", o.ignore_index()},
                                                    {"reduction", o.reduction()},
                                                    {"label_smoothing", o.label_smoothing()},
                                                    {"softcap", o.softcap()},
                                                    {"logit_scale", o.logit_scale()},
                                                    {"z_loss", o.z_loss()},
                                                    {"class_weights", o.class_weights()},
                                                    {"token_weights", o.token_weights()},
                                                    {"shift", o.shift()},
                                                    {"hard_fraction", o.hard_fraction()}});
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

Tensor cross_entropy(const Tensor& logits, const Tensor& target, const CrossEntropyOptions& options) {
  return losses::call_cross_entropy("shoestring::cross_entropy", logits, target, options)[0].toTensor();
}

CrossEntropyStats cross_entropy_with_stats(const Tensor& logits, const Tensor& target,
                                           const CrossEntropyOptions& options) {
  const auto out =
      losses::call_cross_entropy("shoestring::cross_entropy_with_stats", logits, target, options);
  return {out[0].toTensor(), out[1].toTensor(), out[2].toTensor(), out[3].toTensor(), out[4].toTensor()};
}

}  // namespace shoestring
