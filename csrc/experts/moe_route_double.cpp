#include "experts/moe_route.h"

#include <cmath>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace shoestring::experts {
namespace {

using kernels::Route;
using kernels::RouteScore;

bool is_softmax_of_chosen(const Route& route) {
  return route.score == RouteScore::kTopkSoftmax ||
         (route.score == RouteScore::kSoftmax && route.renormalize);
}

// Returns the indices of the k largest elements of the last dimension, the lowest index first among equals.
Tensor first_largest(const Tensor& x, int64_t k) {
  const Tensor order = std::get<1>(at::sort(x, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  return order.slice(-1, 0, k);
}

// Returns for each expert whether its group is among those from which experts are chosen.
Tensor in_chosen_groups(const Tensor& key, const Route& route) {
  const Tensor grouped = key.unflatten(-1, {route.groups, route.experts / route.groups});
  const Tensor best = std::get<0>(grouped.sort(/*dim=*/-1, /*descending=*/true)).slice(-1, 0, 2).sum(-1);
  const Tensor kept = at::zeros(best.sizes(), best.options().dtype(at::kBool))
                          .scatter(-1, first_largest(best, route.top_groups), true);
  return kept.unsqueeze(-1).expand(grouped.sizes()).flatten(-2);
}

// Returns the number of tokens that count, at least 1, so that losses of no tokens are 0.
Tensor tokens_of(const Tensor& counts, const Route& route) {
  return (counts.sum().to(at::kDouble) / route.top_k).clamp_min(1);
}

}  // namespace

RouteResult moe_route_double(const Tensor& logits, const Route& route, double scale,
                             const OptionalTensor& bias, const OptionalTensor& mask) {
  const Tensor shares = logits.softmax(-1), sigmoids = logits.sigmoid();
  const Tensor score = route.score == RouteScore::kSoftmax   ? shares
                       : route.score == RouteScore::kSigmoid ? sigmoids
                                                             : logits;
  const bool limited = route.top_groups < route.groups;
  Tensor key = bias.has_value() ? score + bias->to(at::kDouble) : limited ? score : logits;
  if (limited) key = key.masked_fill(in_chosen_groups(key, route).logical_not(), -INFINITY);
  Tensor index = first_largest(key, route.top_k).contiguous(), weight;
  if (is_softmax_of_chosen(route)) {
    weight = logits.gather(-1, index).softmax(-1);
  } else {
    weight = score.gather(-1, index);
    if (route.renormalize) weight = weight / (weight.sum(-1, true) + kernels::kLeastSum);
  }
  weight = weight * scale;
  Tensor parts = route.score == RouteScore::kSigmoid ? sigmoids / sigmoids.sum(-1, true) : shares;
  Tensor squares = logits.logsumexp(-1).square();
  if (mask.has_value()) {
    const Tensor ignored = mask->logical_not(), of_each = ignored.unsqueeze(-1);
    index = index.masked_fill(of_each, -1);
    weight = weight.masked_fill(of_each, 0);
    parts = parts.masked_fill(of_each, 0);
    squares = squares.masked_fill(ignored, 0);
  }
  const Tensor all = index.flatten();
  const Tensor counts =
      at::zeros({route.experts}, all.options()).scatter_add_(0, all.clamp_min(0), all.ge(0).to(at::kLong));
  const Tensor tokens = tokens_of(counts, route);
  const Tensor sums = parts.reshape({-1, route.experts}).sum(0);
  const auto experts = static_cast<double>(route.experts);
  return {index, weight, counts, (counts * sums).sum() * experts / tokens.square(), squares.sum() / tokens};
}

Tensor moe_route_double_backward(const OptionalTensor& grad_weight, const OptionalTensor& grad_balance,
                                 const OptionalTensor& grad_z, const Tensor& logits, const Tensor& index,
                                 const Tensor& counts, const Route& route, double scale) {
  const Tensor tokens = tokens_of(counts, route), chosen = index.clamp_min(0), shares = logits.softmax(-1);
  const bool sigmoid = route.score == RouteScore::kSigmoid;
  Tensor slope = at::zeros_like(logits), grad = at::zeros_like(logits);
  if (grad_balance.has_value()) {
    slope = slope + *grad_balance * counts * (static_cast<double>(route.experts) / tokens.square());
  }
  const Tensor s = logits.sigmoid(), total = s.sum(-1, true);
  if (sigmoid) slope = (slope - (s * slope).sum(-1, true) / total) / total;
  if (grad_weight.has_value()) {
    const Tensor given = *grad_weight * scale;
    const auto add = [&](Tensor& to, const Tensor& part) { to = to.scatter_add(-1, chosen, part); };
    if (is_softmax_of_chosen(route)) {
      const Tensor weight = logits.gather(-1, chosen).softmax(-1);
      add(grad, weight * (given - (weight * given).sum(-1, true)));
    } else if (sigmoid && route.renormalize) {
      const Tensor best = s.gather(-1, chosen), divisor = best.sum(-1, true) + kernels::kLeastSum;
      add(slope, (given - (best / divisor * given).sum(-1, true)) / divisor);
    } else {
      add(slope, given);
    }
  }
  if (sigmoid) {
    grad = grad + slope * s * (-logits).sigmoid();
  } else {
    grad = grad + shares * (slope - (shares * slope).sum(-1, true));
  }
  if (grad_z.has_value()) grad = grad + *grad_z * 2 / tokens * logits.logsumexp(-1, true) * shares;
  return grad.masked_fill(index.slice(-1, 0, 1).lt(0), 0);
}

}  // namespace shoestring::experts
