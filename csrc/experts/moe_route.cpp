#include "experts/moe_route.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/experts/ops.h>

#include "checkpoint/kept_results.h"
#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/cuda.h"
#include "core/tensors.h"
#include "core/threads.h"

namespace shoestring::experts {
namespace {

using kernels::Route;
using kernels::RouteScore;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kMoeRouteOp = "moe_route";
// On the CPU, tokens are summed in at most kParts parts of at least kLeastTokens tokens, which do not depend
// on the number of threads. On CUDA, a warp sums each part.
constexpr int64_t kParts = 64, kLeastTokens = 16, kCudaParts = 512;

RouteScore score_of(c10::string_view name) {
  if (name == "softmax") return RouteScore::kSoftmax;
  if (name == "sigmoid") return RouteScore::kSigmoid;
  TORCH_CHECK(name == "topk_softmax", kMoeRouteOp,
              ": score: expected 'softmax', 'sigmoid' or 'topk_softmax', received '", name, "'");
  return RouteScore::kTopkSoftmax;
}

void check_moe_route(const Tensor& logits, int64_t top_k, c10::string_view score, const OptionalTensor& bias,
                     int64_t groups, int64_t top_groups, double scale, const OptionalTensor& mask) {
  TORCH_CHECK(is_supported_float(logits.scalar_type()) && logits.dim() > 0, kMoeRouteOp,
              ": logits: expected (..., experts) of fp32, fp64, bf16 or fp16, received ", logits.sym_sizes(),
              " of ", logits.scalar_type());
  const c10::SymInt experts = logits.sym_size(-1);
  TORCH_CHECK(experts > 0 && experts <= kernels::kMostExperts, kMoeRouteOp, ": logits: expected 1 to ",
              kernels::kMostExperts, " experts, received ", experts);
  TORCH_CHECK(top_k > 0 && experts >= top_k, kMoeRouteOp, ": top_k: expected 1 to ", experts,
              ", the number of experts, received ", top_k);
  score_of(score);
  TORCH_CHECK(groups > 0 && experts % groups == 0, kMoeRouteOp,
              ": groups: expected a divisor of the number of experts, ", experts, ", received ", groups);
  TORCH_CHECK(top_groups > 0 && top_groups <= groups, kMoeRouteOp, ": top_groups: expected 1 to ", groups,
              ", the number of groups, received ", top_groups);
  TORCH_CHECK(experts / groups * top_groups >= top_k, kMoeRouteOp,
              ": top_groups: expected groups with at least top_k experts, ", top_k, ", received ",
              experts / groups * top_groups, " experts in ", top_groups, " groups");
  TORCH_CHECK(std::isfinite(scale), kMoeRouteOp, ": scale: expected a finite number, received ", scale);
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == experts && is_supported_float(bias->scalar_type()) &&
                    bias->device() == logits.device(),
                kMoeRouteOp, ": bias: expected (", experts, ") of a floating-point type on ", logits.device(),
                ", received ", bias->sym_sizes(), " of ", bias->scalar_type(), " on ", bias->device());
  }
  if (mask.has_value()) {
    const auto tokens = logits.sym_sizes().slice(0, logits.dim() - 1);
    TORCH_CHECK(
        mask->sym_sizes() == tokens && mask->scalar_type() == at::kBool && mask->device() == logits.device(),
        kMoeRouteOp, ": mask: expected ", tokens, " of Bool on ", logits.device(), ", received ",
        mask->sym_sizes(), " of ", mask->scalar_type(), " on ", mask->device());
  }
}

// Returns the shape of index and weight.
std::vector<c10::SymInt> chosen_shape(const Tensor& logits, int64_t top_k) {
  return with_last(logits, c10::SymInt(top_k));
}

Route route_of(const Tensor& logits, int64_t top_k, c10::string_view score, bool renormalize, int64_t groups,
               int64_t top_groups, double scale) {
  return {logits.size(-1),          top_k, groups, top_groups, score_of(score), renormalize,
          static_cast<float>(scale)};
}

Tensor route_scalar(const Tensor& logits) { return at::empty({}, logits.options().dtype(at::kFloat)); }

const kernels::RouteRows& cpu_route_rows(const Tensor& logits) {
  const auto& k = cpu::moe_route();
  return logits.scalar_type() == at::kFloat      ? k.of_float
         : logits.scalar_type() == at::kBFloat16 ? k.of_bf16
                                                 : k.of_fp16;
}

// Returns the grain of a loop over tokens. An expert's exponential and its place among the best take about as
// long as 64 bytes.
int64_t grain_of_tokens(const Route& route) { return row_grain(64 * route.experts); }

void route_cpu(const Route& route, const kernels::RouteForward& io, const Tensor& logits, int64_t rows,
               const Tensor& counts, const Tensor& balance, const Tensor& z) {
  const int64_t each = std::max((rows + kParts - 1) / kParts, kLeastTokens), parts = (rows + each - 1) / each;
  const int64_t experts = route.experts;
  const Tensor shares = at::zeros({parts + 1, experts}, logits.options().dtype(at::kDouble)),
               part_counts = at::zeros({parts, experts}, counts.options()),
               squares = at::zeros({parts}, logits.options().dtype(at::kDouble));
  auto *all_shares = shares.mutable_data_ptr<double>(), *all_squares = squares.mutable_data_ptr<double>();
  auto* all_counts = part_counts.mutable_data_ptr<int64_t>();
  const auto run = cpu_route_rows(logits).forward;
  at::parallel_for(0, parts, std::max<int64_t>(1, grain_of_tokens(route) / each),
                   [&](int64_t first, int64_t last) {
                     for (int64_t part = first; part < last; ++part) {
                       run(route, io, part * each, std::min(rows, (part + 1) * each),
                           {all_shares + part * experts, all_counts + part * experts, all_squares + part});
                     }
                   });
  // Parts are added in a fixed order.
  double* total = all_shares + parts * experts;
  auto* counted = counts.mutable_data_ptr<int64_t>();
  double square = 0, imbalance = 0;
  int64_t slots = 0;
  std::fill_n(counted, experts, 0);
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t e = 0; e < experts; ++e) {
      total[e] += all_shares[part * experts + e];
      counted[e] += all_counts[part * experts + e];
    }
    square += all_squares[part];
  }
  for (int64_t e = 0; e < experts; ++e) {
    imbalance += static_cast<double>(counted[e]) * total[e];
    slots += counted[e];
  }
  const auto tokens = static_cast<double>(std::max<int64_t>(slots / route.top_k, 1));
  *balance.mutable_data_ptr<float>() =
      static_cast<float>(imbalance * static_cast<double>(experts) / (tokens * tokens));
  *z.mutable_data_ptr<float>() = static_cast<float>(square / tokens);
}

void route_cuda(const Route& route, const kernels::RouteForward& io, const Tensor& logits, int64_t rows,
                const Tensor& counts, const Tensor& balance, const Tensor& z) {
  const auto& k = cuda::table<kernels::RouteCuda>(kMoeRouteOp);
  const int64_t count = std::min(rows, kCudaParts);
  const Tensor shares = at::empty({count, route.experts}, logits.options().dtype(at::kFloat)),
               part_counts = at::empty({count, route.experts}, logits.options().dtype(at::kInt)),
               squares = at::empty({count}, logits.options().dtype(at::kFloat));
  const kernels::RouteParts parts{count, shares.mutable_data_ptr<float>(),
                                  part_counts.mutable_data_ptr<int>(), squares.mutable_data_ptr<float>()};
  const auto run = logits.scalar_type() == at::kFloat      ? k.forward_float
                   : logits.scalar_type() == at::kBFloat16 ? k.forward_bf16
                                                           : k.forward_fp16;
  void* stream = stream_of(logits);
  check_launch(kMoeRouteOp, run(route, io, rows, parts, stream));
  check_launch(kMoeRouteOp, k.finish(route, parts, counts.mutable_data_ptr<int64_t>(),
                                     balance.mutable_data_ptr<float>(), z.mutable_data_ptr<float>(), stream));
}

template <Backend backend>
RouteResult run_moe_route(const Tensor& logits, int64_t top_k, c10::string_view score,
                          const OptionalTensor& bias, bool renormalize, int64_t groups, int64_t top_groups,
                          double scale, const OptionalTensor& mask) {
  check_moe_route(logits, top_k, score, bias, groups, top_groups, scale, mask);
  const c10::OptionalDeviceGuard guard(logits.device());
  const Route route = route_of(logits, top_k, score, renormalize, groups, top_groups, scale);
  if (logits.scalar_type() == at::kDouble) return moe_route_double(logits, route, scale, bias, mask);
  const Tensor source = logits.contiguous();
  const Tensor offset = bias.has_value() ? bias->to(at::kFloat).contiguous() : Tensor();
  const Tensor counted = mask.has_value() ? mask->contiguous() : Tensor();
  const int64_t rows = logits.numel() / route.experts;
  auto shape = logits.sizes().vec();
  shape.back() = top_k;
  const auto integers = logits.options().dtype(at::kLong);
  RouteResult result{at::empty(shape, integers), at::empty(shape, logits.options()),
                     at::empty({route.experts}, integers), route_scalar(logits), route_scalar(logits)};
  auto& [index, weight, counts, balance, z] = result;
  const kernels::RouteForward io{source.const_data_ptr(),
                                 offset.defined() ? offset.const_data_ptr<float>() : nullptr,
                                 counted.defined() ? counted.const_data_ptr<bool>() : nullptr,
                                 index.mutable_data_ptr<int64_t>(), weight.mutable_data_ptr()};
  const auto run = backend == Backend::kCuda ? route_cuda : route_cpu;
  run(route, io, source, rows, counts, balance, z);
  return result;
}

RouteResult moe_route_meta(const Tensor& logits, int64_t top_k, c10::string_view score,
                           const OptionalTensor& bias, bool renormalize, int64_t groups, int64_t top_groups,
                           double scale, const OptionalTensor& mask) {
  check_moe_route(logits, top_k, score, bias, groups, top_groups, scale, mask);
  const auto shape = chosen_shape(logits, top_k);
  const auto integers = logits.options().dtype(at::kLong);
  const auto losses = logits.options().dtype(compute_type(logits));
  return {at::empty_symint(shape, integers), at::empty_symint(shape, logits.options()),
          at::empty_symint({logits.sym_size(-1)}, integers), at::empty({}, losses), at::empty({}, losses)};
}

// Returns the gradient of the shares of each token, (experts), for the balance loss.
Tensor balance_slopes(const Route& route, const Tensor& counts, double grad_balance, int64_t tokens) {
  const double factor = grad_balance * static_cast<double>(route.experts) /
                        (static_cast<double>(tokens) * static_cast<double>(tokens));
  const Tensor slopes = at::empty({route.experts}, counts.options().dtype(at::kFloat));
  const auto* count = counts.const_data_ptr<int64_t>();
  auto* slope = slopes.mutable_data_ptr<float>();
  for (int64_t e = 0; e < route.experts; ++e)
    slope[e] = static_cast<float>(factor * static_cast<double>(count[e]));
  return slopes;
}

void route_backward_cpu(const Route& route, const kernels::RouteBackward& io, const Tensor& logits,
                        int64_t rows, const Tensor& counts, const Tensor& grad_balance,
                        const Tensor& grad_z) {
  int64_t slots = 0;
  for (int64_t e = 0; e < route.experts; ++e) slots += counts.const_data_ptr<int64_t>()[e];
  const int64_t tokens = std::max<int64_t>(slots / route.top_k, 1);
  const Tensor slopes =
      grad_balance.defined()
          ? balance_slopes(route, counts, static_cast<double>(*grad_balance.const_data_ptr<float>()), tokens)
          : Tensor();
  const float* slope = slopes.defined() ? slopes.const_data_ptr<float>() : nullptr;
  const auto z_slope =
      static_cast<float>(grad_z.defined() ? 2 * static_cast<double>(*grad_z.const_data_ptr<float>()) /
                                                static_cast<double>(tokens)
                                          : 0);
  const auto run = cpu_route_rows(logits).backward;
  at::parallel_for(0, rows, grain_of_tokens(route),
                   [&](int64_t begin, int64_t end) { run(route, io, slope, z_slope, begin, end); });
}

void route_backward_cuda(const Route& route, const kernels::RouteBackward& io, const Tensor& logits,
                         int64_t rows, const Tensor& counts, const Tensor& grad_balance,
                         const Tensor& grad_z) {
  const auto& k = cuda::table<kernels::RouteCuda>(kMoeRouteOp);
  const auto run = logits.scalar_type() == at::kFloat      ? k.backward_float
                   : logits.scalar_type() == at::kBFloat16 ? k.backward_bf16
                                                           : k.backward_fp16;
  const auto number = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
  check_launch(kMoeRouteOp, run(route, io, counts.const_data_ptr<int64_t>(), number(grad_balance),
                                number(grad_z), rows, stream_of(logits)));
}

template <Backend backend>
Tensor run_moe_route_backward(const OptionalTensor& grad_weight, const OptionalTensor& grad_balance,
                              const OptionalTensor& grad_z, const Tensor& logits, const Tensor& index,
                              const Tensor& counts, c10::string_view score, bool renormalize, double scale) {
  const c10::OptionalDeviceGuard guard(logits.device());
  const Route route = route_of(logits, index.size(-1), score, renormalize, 1, 1, scale);
  if (logits.scalar_type() == at::kDouble)
    return moe_route_double_backward(grad_weight, grad_balance, grad_z, logits, index, counts, route, scale);
  const Tensor source = logits.contiguous(), chosen = index.contiguous(), counted = counts.contiguous();
  const Tensor upstream = grad_weight.has_value() ? grad_weight->contiguous() : Tensor();
  Tensor grad = at::empty(logits.sizes(), logits.options());
  const kernels::RouteBackward io{source.const_data_ptr(), chosen.const_data_ptr<int64_t>(),
                                  upstream.defined() ? upstream.const_data_ptr() : nullptr,
                                  grad.mutable_data_ptr()};
  const auto run = backend == Backend::kCuda ? route_backward_cuda : route_backward_cpu;
  run(route, io, source, logits.numel() / route.experts, counted, grad_balance.value_or(Tensor()),
      grad_z.value_or(Tensor()));
  return grad;
}

Tensor moe_route_backward_meta(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const Tensor& logits, const Tensor&, const Tensor&, c10::string_view, bool,
                               double) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

RouteResult call_moe_route(const Tensor& logits, int64_t top_k, c10::string_view score,
                           const OptionalTensor& bias, bool renormalize, int64_t groups, int64_t top_groups,
                           double scale, const OptionalTensor& mask) {
  static auto op = find<decltype(moe_route_meta)>("shoestring::moe_route");
  // A checkpoint keeps the choice: with logits that are rounded in another way, it could be another one.
  const auto r = activations::kept_results([&]() -> std::vector<Tensor> {
    const auto [index, weight, counts, balance, z] =
        op.call(logits, top_k, score, bias, renormalize, groups, top_groups, scale, mask);
    return {index, weight, counts, balance, z};
  });
  return {r[0], r[1], r[2], r[3], r[4]};
}

// Autograd of moe_route. Saves the logits, the choice and the counts. The bias has no gradient.
class MoeRouteFunction : public torch::autograd::Function<MoeRouteFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, int64_t top_k,
                               c10::string_view score, const OptionalTensor& bias, bool renormalize,
                               int64_t groups, int64_t top_groups, double scale, const OptionalTensor& mask) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [index, weight, counts, balance, z] =
        call_moe_route(logits, top_k, score, bias, renormalize, groups, top_groups, scale, mask);
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({index, counts});
    save_fields(ctx, Saved{logits, index, counts, std::string(score), renormalize, scale});
    return {index, weight, counts, balance, z};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    Tensor grad;
    if (upstream[1].defined() || upstream[3].defined() || upstream[4].defined()) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<decltype(moe_route_backward_meta)>("shoestring::_moe_route_backward");
      grad = op.call(as_optional(upstream[1]), as_optional(upstream[3]), as_optional(upstream[4]),
                     saved.logits, saved.index, saved.counts, saved.score, saved.renormalize, saved.scale);
    }
    const variable_list g = once_differentiable(kMoeRouteOp, {grad});
    return {g[0], {}, {}, {}, {}, {}, {}, {}, {}};
  }

 private:
  struct Saved {
    Tensor logits, index, counts;
    std::string score;
    bool renormalize = false;
    double scale = 1;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.logits, self.index, self.counts, self.score, self.renormalize, self.scale);
    }
  };
};

RouteResult moe_route_autograd(const Tensor& logits, int64_t top_k, c10::string_view score,
                               const OptionalTensor& bias, bool renormalize, int64_t groups,
                               int64_t top_groups, double scale, const OptionalTensor& mask) {
  if (needs_grad(logits)) {
    const variable_list r =
        MoeRouteFunction::apply(logits, top_k, score, bias, renormalize, groups, top_groups, scale, mask);
    return {r[0], r[1], r[2], r[3], r[4]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_moe_route(logits, top_k, score, bias, renormalize, groups, top_groups, scale, mask);
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Chooses the top_k best of the experts for each token, from router logits (..., experts). Computes in
  // fp32. Equal scores rank by the lowest index, and NaN ranks above all numbers.
  // - score: 'softmax', 'sigmoid', or 'topk_softmax', the softmax of the chosen logits.
  // - bias (experts) is added to the scores for the choice alone. renormalize divides the weights by their
  //   sum, and scale multiplies them.
  // - groups, top_groups: experts are chosen from the top_groups groups with the largest sum of their two
  //   best scores.
  // - mask (...), bool: tokens for which it is false have index -1 and weight 0, and do not count.
  // index is int64, weight has the dtype of the logits. counts (experts), int64, is the number of tokens of
  // each expert. balance is experts / n^2 * sum(counts * sum of the tokens' shares), where n is the number of
  // tokens that count. z is the mean of the tokens' squared log-sum-exp.
  m.def(R"(moe_route(Tensor logits, int top_k, *, str score='softmax', Tensor? bias=None,
      bool renormalize=False, int groups=1, int top_groups=1, float scale=1., Tensor? mask=None) -> (
      Tensor index, Tensor weight, Tensor counts, Tensor balance, Tensor z))");
  // Computes the gradient of the logits of moe_route from its results index and counts.
  m.def(R"(_moe_route_backward(Tensor? grad_weight, Tensor? grad_balance, Tensor? grad_z, Tensor logits,
      Tensor index, Tensor counts, str score, bool renormalize, float scale) -> Tensor)");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("moe_route", run_moe_route<Backend::kCpu>);
  m.impl("_moe_route_backward", run_moe_route_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("moe_route", run_moe_route<Backend::kCuda>);
  m.impl("_moe_route_backward", run_moe_route_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("moe_route", moe_route_meta);
  m.impl("_moe_route_backward", moe_route_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("moe_route", moe_route_autograd); }

}  // namespace
}  // namespace shoestring::experts

namespace shoestring {

MoeRoute moe_route(const at::Tensor& logits, int64_t top_k, const MoeRouteOptions& options) {
  static auto op = find<decltype(experts::moe_route_meta)>("shoestring::moe_route");
  const auto [index, weight, counts, balance, z] =
      op.call(logits, top_k, options.score(), options.bias(), options.renormalize(), options.groups(),
              options.top_groups(), options.scale(), options.mask());
  return {index, weight, counts, balance, z};
}

}  // namespace shoestring
