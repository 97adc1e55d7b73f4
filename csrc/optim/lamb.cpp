// LAMB (You et al., arXiv 1904.00962): AdamW's update, scaled to the norm of the weights.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/optim/rules.h>

#include "optim/all_reduce.h"
#include "optim/composite.h"
#include "optim/rule.h"
#include "optim/split_params.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

void lamb(const Call& call, const LAMBOptions& o) {
  const double decay = o.weight_decay();
  const auto adamw = AdamWOptions(1).betas(o.betas()).eps(o.eps()).weight_decay(0);
  struct Update {
    const Share* share;
    Tensor u, norm, length;  // the negative update, the norm of the weights, and that of the update
  };
  const auto apply = [&](const Update& made) {
    const Tensor trust =
        at::where((made.norm > 0).logical_and_(made.length > 0), made.norm / made.length, 1.0f);
    made.share->apply(made.u, decay, {},
                      call.lr_tensor ? trust * call.lr_tensor->reshape({}) : trust * call.lr,
                      /*maximize=*/true);
  };
  std::vector<Update> split;  // of parameters of which this process has a part
  const std::vector<Share> all = shares(call);
  for (const Share& s : all) {
    // The operator adamw_ with lr = 1 subtracts AdamW's update from u = 0, so u becomes the negative update.
    const Tensor u = s.empty().zero_();
    Arguments step = s.arguments(adamw, u, s.grad, s.before);
    s.pass_gradient(step);
    s.pass_moments(step);
    step.call();
    const Tensor length = at::linalg_vector_norm(decay == 0 ? u : at::sub(u, s.weight(), decay));
    const SplitParameter* whole = split_of(s.param);
    const bool is_split = whole != nullptr && !whole->groups.empty();
    is_split ? split.push_back({&s, u, s.weight_norm(), length}) : apply({&s, u, s.weight_norm(), length});
  }
  if (split.empty()) return;
  const SplitParameter& whole = *split_of(split[0].share->param);
  std::vector<Tensor> squares;
  for (const Update& made : split) squares.insert(squares.end(), {made.norm.square(), made.length.square()});
  Tensor sums = at::stack(squares).to(whole.device);
  for (const std::string& group : whole.groups) sums = detail::all_reduce(sums, "sum", group);
  sums = sums.sqrt().to(squares[0].device());
  for (size_t i = 0; i < split.size(); ++i) {
    const auto at = static_cast<int64_t>(2 * i);
    apply({split[i].share, split[i].u, sums[at], sums[at + 1]});
  }
}

const Registered<LAMBOptions, lamb, lamb> kLambRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& LAMBOptions::rule() const {
  static const Rule rule{.name = "LAMB",
                         .op = "lamb_",
                         .moments = {{"exp_avg", true}, {"exp_avg_sq", false}},
                         .takes_whole_parameters = true,
                         .takes_ranges = true};
  return rule;
}

std::vector<Field> LAMBOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
