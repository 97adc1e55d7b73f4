#include "losses/cross_entropy.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <shoestring/ops.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/huge_pages.h"
#include "core/tensors.h"

namespace shoestring::losses {
namespace {

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

CrossEntropyProblem::CrossEntropyProblem(const RowsCall& call)
    : RowsProblem(kCrossEntropyOp, call, call.input.sym_size(-1)), logits(call.input) {
  check_tokens(kCrossEntropyOp, "logits", "vocab", logits, target);
  TORCH_CHECK(target.device() == logits.device(), kCrossEntropyOp, ": target: expected logits' device, ",
              logits.device(), ", received ", target.device());
}

void run_cross_entropy_rows(torch::jit::Stack* stack, CrossEntropyRun run) {
  const auto call = read_fields<CrossEntropyRowsCall<false>>(*stack);
  CrossEntropyProblem p(call);
  if (call.gradient) {
    p.gradient = in_huge_pages(at::empty(p.logits.sizes(), p.logits.options()));
    p.gradient_layout = *layout_of(p.gradient);
  }
  if (!layout_of(p.logits)) p.logits = p.logits.contiguous();
  p.layout = *layout_of(p.logits);
  CrossEntropyResult r{run(p), p.gradient.defined() ? p.gradient : at::empty({0}, p.logits.options())};
  r.fill(p.logits);
  torch::jit::drop(*stack, count_of<CrossEntropyRowsCall<false>>());
  push_fields(*stack, r);
}

void run_cross_entropy_rows_in_place(torch::jit::Stack* stack, CrossEntropyRun run) {
  CrossEntropyProblem p(read_fields<CrossEntropyRowsCall<true>>(*stack));
  TORCH_CHECK(writable(p.logits), kCrossEntropyOp,
              "_rows_: logits: expected contiguous classes, tokens in at most two strides and no overlapping "
              "memory, received strides ",
              p.logits.strides(), " of ", p.logits.sizes());
  p.gradient = p.logits;
  p.layout = p.gradient_layout = *layout_of(p.logits);
  RowsResult r = run(p);
  r.fill(p.logits);
  torch::jit::drop(*stack, count_of<CrossEntropyRowsCall<true>>());
  push_fields(*stack, r);
}

CrossEntropyCall::CrossEntropyCall(const torch::jit::Stack& stack, bool stats) {
  auto given = read_fields<CrossEntropyArguments<LogitsOptions>>(stack);
  input = std::move(given.logits);
  target = std::move(given.target);
  const int64_t dims = std::max<int64_t>(input.dim(), 1);
  const int64_t dim = given.options.dim() < 0 ? given.options.dim() + dims : given.options.dim();
  TORCH_CHECK(dim >= 0 && dim < dims, kCrossEntropyOp, ": dim: expected a dimension of the logits, ", -dims,
              " to ", dims - 1, ", received ", given.options.dim());
  if (dim != dims - 1) {
    const Tensor logits = input;
    input = logits.movedim(dim, -1);
    TORCH_CHECK(target.sym_sizes() == input.sym_sizes().slice(0, dims - 1), kCrossEntropyOp,
                ": target: expected logits' shape without dimension ", dim, ", ",
                input.sym_sizes().slice(0, dims - 1), ", received ", target.sym_sizes());
  }
  options = std::move(given.options);
  prepare(kCrossEntropyOp, "logits", "vocab", input.dim() == 0 ? 1 : input.sym_size(-1), stats);
}

void CrossEntropyCall::make_readable() {
  const bool symbolic = input.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  if (!is_traced(input) && !symbolic && !layout_of(input)) input = input.contiguous();
}

namespace {

template <bool kInPlace>
CrossEntropyRowsCall<kInPlace> rows_call(const CrossEntropyCall& call, const std::array<Tensor, 3>& upstream,
                                         bool gradient) {
  return {{call.input, call.target, call.options, as_optional(upstream[0]), as_optional(upstream[1]),
           as_optional(upstream[2]), call.stats},
          gradient};
}

}  // namespace

CrossEntropyResult cross_entropy_rows(const CrossEntropyCall& call, const std::array<Tensor, 3>& upstream,
                                      LogitsGradient gradient) {
  CrossEntropyResult r;
  if (gradient == LogitsGradient::kInPlace) {
    static const Operator<CrossEntropyRowsCall<true>, RowsResult> op("shoestring::_cross_entropy_rows_");
    static_cast<RowsResult&>(r) = op(rows_call<true>(call, upstream, true));
  } else {
    const bool wanted = gradient == LogitsGradient::kNew;
    static const Operator<CrossEntropyRowsCall<false>, CrossEntropyResult> op(
        "shoestring::_cross_entropy_rows");
    r = op(rows_call<false>(call, upstream, wanted));
    if (!wanted) r.gradient = Tensor();
  }
  if (!call.stats) r.entropy = r.argmax = Tensor();
  return r;
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

void cross_entropy_rows_meta(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto call = read_fields<CrossEntropyRowsCall<false>>(*stack);
  const CrossEntropyProblem p(call);
  CrossEntropyResult r{cross_entropy_rows_on_meta(p),
                       call.gradient ? at::empty_symint(p.logits.sym_sizes(), p.logits.options())
                                     : at::empty({0}, p.logits.options())};
  r.fill(p.logits);
  torch::jit::drop(*stack, count_of<CrossEntropyRowsCall<false>>());
  push_fields(*stack, r);
}

void cross_entropy_rows_in_place_meta(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const CrossEntropyProblem p(read_fields<CrossEntropyRowsCall<true>>(*stack));
  RowsResult r = cross_entropy_rows_on_meta(p);
  r.fill(p.logits);
  torch::jit::drop(*stack, count_of<CrossEntropyRowsCall<true>>());
  push_fields(*stack, r);
}

// Implements the four cross_entropy operators for calls that need no gradient. One implementation serves
// every device. The in-place variants, whose names end in _, do not change the logits here.
template <bool kStats>
void cross_entropy_without_gradients(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  CrossEntropyCall call(*stack, kStats);
  call.make_readable();
  keep_hardest(call);
  const Reduction reduction(call);
  reduction.balance(call);
  const auto r = cross_entropy_rows(call, {}, LogitsGradient::kNone);
  torch::jit::drop(*stack, count_of<CrossEntropyArguments<CrossEntropyOptions>>());
  torch::jit::push(*stack, reduction.apply(r.loss));
  if constexpr (kStats) {
    torch::jit::push(*stack, reduction.original(r.loss, r.lse), r.lse, r.entropy, r.argmax,
                     count_correct(r.argmax, call.target));
  }
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_cross_entropy_rows", torch::CppFunction::makeFromBoxedFunction<&cross_entropy_rows_meta>());
  m.impl("_cross_entropy_rows_",
         torch::CppFunction::makeFromBoxedFunction<&cross_entropy_rows_in_place_meta>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  for (const char* name : {"cross_entropy", "cross_entropy_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_without_gradients<false>>());
  }
  for (const char* name : {"cross_entropy_with_stats", "cross_entropy_with_stats_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_without_gradients<true>>());
  }
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {
namespace {

// Calls the operator `name` or, with the option `inplace`, the operator in_place.
template <class Results>
Results call_cross_entropy(const char* name, const char* in_place, const at::Tensor& logits,
                           const at::Tensor& target, const CrossEntropyOptions& options) {
  if (options.inplace()) {
    static const Operator<losses::CrossEntropyArguments<CrossEntropyOptions, true>, Results> op(in_place);
    return op({logits, target, options});
  }
  static const Operator<losses::CrossEntropyArguments<CrossEntropyOptions>, Results> op(name);
  return op({logits, target, options});
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  return call_cross_entropy<TensorResult>("shoestring::cross_entropy", "shoestring::cross_entropy_", logits,
                                          target, options)
      .tensor;
}

CrossEntropyStats cross_entropy_with_stats(const at::Tensor& logits, const at::Tensor& target,
                                           const CrossEntropyOptions& options) {
  return call_cross_entropy<losses::StatsResult>("shoestring::cross_entropy_with_stats",
                                                 "shoestring::cross_entropy_with_stats_", logits, target,
                                                 options);
}

}  // namespace shoestring
