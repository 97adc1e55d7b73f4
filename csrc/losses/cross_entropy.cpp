#include "losses/cross_entropy.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <shoestring/losses/ops.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/huge_pages.h"

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

std::optional<kernels::CrossEntropyLayout> layout_of(const Tensor& logits) {
  if (logits.numel() == 0) return kernels::CrossEntropyLayout{1, 0, 0};
  const auto strides = strides_of_tokens(logits);
  if ((logits.stride(-1) != 1 && logits.size(-1) != 1) || strides.size() > 2) return std::nullopt;
  kernels::CrossEntropyLayout found{1, 0, 0};
  if (!strides.empty()) std::tie(found.inner, found.inner_stride) = strides[0];
  if (strides.size() == 2) found.outer_stride = strides[1].second;
  return found;
}

bool writable(const Tensor& logits) {
  if (!layout_of(logits)) return false;
  if (logits.numel() == 0) return true;
  auto strides = strides_of_tokens(logits);
  strides.resize(2, {1, 0});
  auto [near, far] = std::pair(strides[0], strides[1]);
  if (far.first > 1 && far.second < near.second) std::swap(near, far);
  return (near.first == 1 || near.second >= logits.size(-1)) &&
         (far.first == 1 || far.second >= (near.first - 1) * near.second + logits.size(-1));
}

void CrossEntropyResult::fill(const Tensor& like) {
  RowsResult::fill(like);
  if (!gradient.defined()) gradient = at::empty({0}, like.options());
}

CrossEntropyProblem CrossEntropyProblem::read(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  auto p = read_fields<CrossEntropyProblem>(stack);
  const int64_t dims = std::max<int64_t>(p.input.dim(), 1), dim = p.dim < 0 ? p.dim + dims : p.dim;
  TORCH_CHECK(dim >= 0 && dim < dims, kCrossEntropyOp, ": dim: expected a dimension of the logits, ", -dims,
              " to ", dims - 1, ", received ", p.dim);
  if (dim != dims - 1) {
    p.input = p.input.movedim(dim, -1);
    const auto tokens = p.input.sym_sizes().slice(0, dims - 1);
    TORCH_CHECK(p.target.sym_sizes() == tokens, kCrossEntropyOp,
                ": target: expected logits' shape without dimension ", dim, ", ", tokens, ", received ",
                p.target.sym_sizes());
  }
  p.classes = p.input.dim() == 0 ? 1 : p.input.sym_size(-1);
  p.stats = op.schema().returns().size() > 1;
  p.prepare();
  return p;
}

void CrossEntropyProblem::make_readable() {
  const bool symbolic = input.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  if (!is_traced(input) && !symbolic && !layout_of(input)) input = input.contiguous();
}

void CrossEntropyProblem::check_rows() {
  classes = input.sym_size(-1);
  TokenProblem::check_rows();
  check_tokens();
  TORCH_CHECK(target.device() == input.device(), kCrossEntropyOp, ": target: expected logits' device, ",
              input.device(), ", received ", target.device());
}

void CrossEntropyProblem::place() {
  if (in_place) {
    TORCH_CHECK(
        writable(input), kCrossEntropyOp,
        "_rows_: logits: expected contiguous classes, tokens in at most two strides and no overlapping "
        "memory, received strides ",
        input.strides(), " of ", input.sizes());
    gradient = input;
  } else if (wants_gradient) {
    gradient = in_huge_pages(at::empty(input.sizes(), input.options()));
  }
  if (gradient.defined()) gradient_layout = *layout_of(gradient);
  if (!layout_of(input)) input = input.contiguous();
  layout = *layout_of(input);
}

namespace {

// Calls _cross_entropy_rows or, with kInPlace, _cross_entropy_rows_.
template <class Results, bool kInPlace>
Results call_cross_entropy_rows(const CrossEntropyProblem& p, const std::array<Tensor, 3>& upstream,
                                bool gradient, const char* name) {
  static const Operator<CrossEntropyRowsArguments<kInPlace>, Results> op(name);
  CrossEntropyRowsArguments<kInPlace> rows{p};
  rows.set_upstream(upstream);
  rows.wants_gradient = gradient;
  return op(rows);
}

}  // namespace

CrossEntropyResult CrossEntropyProblem::rows(const std::array<Tensor, 3>& upstream,
                                             LogitsGradient gradient) const {
  CrossEntropyResult r;
  if (gradient == LogitsGradient::kInPlace) {
    static_cast<RowsResult&>(r) =
        call_cross_entropy_rows<RowsResult, true>(*this, upstream, true, "shoestring::_cross_entropy_rows_");
  } else {
    const bool wanted = gradient == LogitsGradient::kNew;
    r = call_cross_entropy_rows<CrossEntropyResult, false>(*this, upstream, wanted,
                                                           "shoestring::_cross_entropy_rows");
    if (!wanted) r.gradient = Tensor();
  }
  if (!stats) r.entropy = r.argmax = Tensor();
  return r;
}

namespace {

RowsResult cross_entropy_rows_meta(CrossEntropyProblem& p) {
  if (p.wants_gradient) p.gradient = at::empty_symint(p.input.sym_sizes(), p.input.options());
  return p.allocate(/*zeros=*/false);
}

// Implements the four cross_entropy operators for calls that need no gradient. One implementation serves
// every device. The in-place variants, whose names end in _, do not change the logits here.
void cross_entropy_without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto p = CrossEntropyProblem::read(op, *stack);
  p.make_readable();
  replace_arguments<CrossEntropyProblem>(stack, without_gradients(std::move(p)));
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) { register_cross_entropy_rows<cross_entropy_rows_meta>(m); }
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  for (const char* name :
       {"cross_entropy", "cross_entropy_", "cross_entropy_with_stats", "cross_entropy_with_stats_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cross_entropy_without_gradients>());
  }
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {
namespace {

// The arguments of cross_entropy with the options of its users.
struct CrossEntropyArguments {
  at::Tensor logits, target;
  CrossEntropyOptions options;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    losses::visit_cross_entropy(self.logits, self.target, self.options, self.options.dim(), visit);
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  using Op = Operator<CrossEntropyArguments, TensorResult>;
  static const Op op("shoestring::cross_entropy"), in_place("shoestring::cross_entropy_");
  return (options.inplace() ? in_place : op)({logits, target, options}).tensor;
}

CrossEntropyStats cross_entropy_with_stats(const at::Tensor& logits, const at::Tensor& target,
                                           const CrossEntropyOptions& options) {
  using Op = Operator<CrossEntropyArguments, losses::StatsResult>;
  static const Op op("shoestring::cross_entropy_with_stats"),
      in_place("shoestring::cross_entropy_with_stats_");
  return (options.inplace() ? in_place : op)({logits, target, options});
}

}  // namespace shoestring
