// Muon (Jordan, 2024): orthogonalises the momentum of a matrix.

#include <array>
#include <cmath>

#include <ATen/Functions.h>

#include <shoestring/optim/rules.h>

#include "gemm/products.h"
#include "optim/composite.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

struct MuonArguments {
  double momentum, eps;
  bool nesterov;
  std::array<double, 3> coefficients;
  int64_t steps;
  std::string adjust_lr_fn;

  explicit MuonArguments(const Call& call)
      : momentum(call.fraction("momentum")), eps(call.at_least_zero("eps")),
        nesterov(call["nesterov"].toBool()), steps(call["ns_steps"].toInt()),
        adjust_lr_fn(call["adjust_lr_fn"].toOptional<std::string>().value_or("original")) {
    const auto given = call["ns_coefficients"].toDoubleVector();
    TORCH_CHECK(given.size() == 3, call.op, ": ns_coefficients: expected 3 numbers, received ", given.size());
    std::copy(given.begin(), given.end(), coefficients.begin());
    TORCH_CHECK(steps > 0 && steps < 100, call.op, ": ns_steps: expected a number from 1 to 99, received ",
                steps);
    TORCH_CHECK(adjust_lr_fn == "original" || adjust_lr_fn == "match_rms_adamw", call.op,
                ": adjust_lr_fn: expected original or match_rms_adamw, received '", adjust_lr_fn, "'");
  }

  double scale(const Tensor& x) const {
    const double rows = x.size(0), columns = x.size(1);
    return adjust_lr_fn == "original" ? std::sqrt(std::max(1.0, columns == 0 ? 1.0 : rows / columns))
                                      : 0.2 * std::sqrt(std::max(rows, columns));
  }
};

// Returns about scale * U V^T, where x = U S V^T is the singular value decomposition of x, by Newton-Schulz
// iteration. After five steps with the default polynomial, the singular values of the result divided by
// scale are in [0.7, 1.2]. The polynomial is odd, so the computation needs matrix products only. Overwrites
// x.
Tensor orthogonal(Tensor x, const MuonArguments& o, double scale) {
  x.div_(at::linalg_vector_norm(x).clamp_min_(o.eps));
  const bool tall = x.size(0) > x.size(1);
  Tensor y = tall ? x.t() : x;
  y = y.to(y.is_cuda() || gemm::multiplies_bf16() ? at::kBFloat16 : at::kFloat);
  x.reset();
  const auto [a, b, c] = o.coefficients;
  for (int64_t i = 1; i <= o.steps; ++i) {
    const double s = i == o.steps ? scale : 1;
    const Tensor gram = at::mm(y, y.t());  // (m, m), where m is the smaller dimension of x
    y = at::addmm(y, at::addmm(gram, gram, gram, b, c), y, a * s, s);
  }
  return tall ? y.t() : y;
}

void muon(const Call& call) {
  const MuonArguments options(call);
  call.options();
  const Moment momentum{"momentum_buffer", true, call.tensor("momentum_buffer"),
                        call.optional("momentum_buffer_scale")};
  for (size_t i = 0; i < call.params.size(); ++i) {
    TORCH_CHECK(call.params[i].dim() == 2, call.op, ": params[", i, "]: expected a matrix, received shape ",
                call.params[i].sizes(), "; use adamw_ for parameters of other shapes");
  }
  for (const Share& s : shares(call, {momentum})) {
    Tensor x = s.empty();
    s.run("_ema_", x, s.grad, s.before,
          {s.of_gradient(),
           s.moment("exp_avg", momentum),
           {{"beta", options.momentum}, {"nesterov", options.nesterov}}});
    s.apply(orthogonal(std::move(x), options, options.scale(s.param)));
  }
}

const Registered<muon, muon> kMuonRegistered("muon_");

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& MuonOptions::rule() const {
  static const Rule rule{
      "Muon", "muon_", {{"momentum_buffer", true}}, nullptr, /*takes_matrices_alone=*/true};
  return rule;
}

std::vector<Field> MuonOptions::fields() {
  return {{"momentum", &momentum_, &kFraction},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"nesterov", &nesterov_},
          {"ns_coefficients", &ns_coefficients_},
          {"eps", &eps_, &kAtLeastZero},
          {"ns_steps", &ns_steps_},
          {"adjust_lr_fn", &adjust_lr_fn_}};
}

void MuonOptions::check() const {
  expect(ns_coefficients_.size() == 3, rule().name, "ns_coefficients", "3 numbers", ns_coefficients_.size());
  expect(ns_steps_ > 0 && ns_steps_ < 100, rule().name, "ns_steps", "a whole number from 1 to 99", ns_steps_);
  const std::string adjust = adjust_lr_fn_.value_or("original");
  expect(adjust == "original" || adjust == "match_rms_adamw", rule().name, "adjust_lr_fn",
         "none, \"original\" or \"match_rms_adamw\"", "\"" + adjust + "\"");
}

}  // namespace shoestring::optim
