// Muon (Jordan, 2024): orthogonalises the momentum of a matrix.

#include <algorithm>
#include <cmath>

#include <ATen/Functions.h>

#include <shoestring/optim/rules.h>

#include "core/device.h"
#include "gemm/products.h"
#include "optim/rule.h"
#include "optim/rules/composite.h"
#include "optim/split/owners.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;
using detail::matrix_cost;
using detail::on_owners;
using detail::SplitMatrix;

// Returns the factor of the learning rate for a matrix.
double lr_scale(at::IntArrayRef sizes, const MuonOptions& o) {
  const auto rows = static_cast<double>(sizes[0]), columns = static_cast<double>(sizes[1]);
  return o.adjust_lr_fn() == "match_rms_adamw"
             ? 0.2 * std::sqrt(std::max(rows, columns))
             : std::sqrt(std::max(1.0, columns == 0 ? 1.0 : rows / columns));
}

// Returns the dtype of the products, and of their result.
at::ScalarType product_dtype(const Tensor& x) {
  return is_asynchronous(x) || gemm::multiplies_bf16() ? at::kBFloat16 : at::kFloat;
}

// Returns about scale * U V^T, where x = U S V^T is the singular value decomposition of x, by Newton-Schulz
// iteration. After five steps with the default polynomial, the singular values of the result divided by
// scale are in [0.7, 1.2]. The polynomial is odd, so the computation needs matrix products only. Overwrites
// x.
Tensor orthogonal(Tensor x, const MuonOptions& o, double scale) {
  x.div_(at::linalg_vector_norm(x).clamp_min_(o.eps()));
  const bool tall = x.size(0) > x.size(1);
  Tensor y = tall ? x.t() : x;
  y = y.to(product_dtype(y));
  x.reset();
  const double a = o.ns_coefficients()[0], b = o.ns_coefficients()[1], c = o.ns_coefficients()[2];
  for (int64_t i = 1; i <= o.ns_steps(); ++i) {
    const double s = i == o.ns_steps() ? scale : 1;
    const Tensor gram = at::mm(y, y.t());  // (m, m), where m is the smaller dimension of x
    y = at::addmm(y, at::addmm(gram, gram, gram, b, c), y, a * s, s);
  }
  return tall ? y.t() : y;
}

void muon(const Call& call, const MuonOptions& o) {
  for (size_t i = 0; i < call.params.size(); ++i) {
    const auto sizes = whole_sizes(call.params[i]);
    TORCH_CHECK(sizes.size() == 2, call.op, ": params[", i, "]: expected a matrix, received shape ", sizes,
                "; use adamw_ for parameters of other shapes");
  }
  const auto ema = EmaOptions().beta(o.momentum()).nesterov(o.nesterov());
  std::vector<const Share*> split;  // matrices of which this process has a part
  std::vector<SplitMatrix> parts;
  const std::vector<Share> all = shares(call);
  for (const Share& s : all) {
    Tensor x = s.empty();
    {
      Arguments mean = s.arguments(ema, x, s.grad, s.before);
      s.pass_gradient(mean);
      s.pass_moments(mean);
      mean.call();
    }
    if (const SplitParameter* whole = split_of(s.param)) {
      split.push_back(&s);
      parts.push_back({std::move(x), whole, matrix_cost(whole->sizes)});
    } else {
      s.apply(orthogonal(std::move(x), o, lr_scale(s.param.sizes(), o)), o.weight_decay());
    }
  }
  if (parts.empty()) return;
  // Steps within backward have one matrix each, so each begins at another rank.
  on_owners(parts, product_dtype(parts[0].part), call.number_of(split[0]->index), [&](size_t i, Tensor x) {
    return orthogonal(std::move(x), o, lr_scale(parts[i].split->sizes, o));
  });
  for (size_t i = 0; i < parts.size(); ++i)
    split[i]->apply(parts[i].part.view(split[i]->param.sizes()), o.weight_decay());
}

const Registered<MuonOptions, muon, muon> kMuonRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

namespace {
constexpr Allowed kNewtonSchulzSteps{"from 1 to 99", [](double x) { return x >= 1 && x <= 99; }};
}  // namespace

const Rule& MuonOptions::rule() const {
  static const Rule rule{
      .name = "Muon", .op = "muon_", .moments = {{"momentum_buffer", true}}, .takes_matrices_alone = true};
  return rule;
}

std::vector<Field> MuonOptions::fields() {
  return {{"momentum", &momentum_, &kFraction},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"nesterov", &nesterov_, nullptr, Argument::kOptional},
          {"ns_coefficients", &ns_coefficients_, nullptr, Argument::kOptional},
          {"eps", &eps_, &kAtLeastZero, Argument::kOptional},
          {"ns_steps", &ns_steps_, &kNewtonSchulzSteps, Argument::kOptional},
          {"adjust_lr_fn", &adjust_lr_fn_, nullptr, Argument::kOptional}};
}

void MuonOptions::check(const Reporter& reporter) const {
  if (ns_coefficients_.size() != 3) reporter.refuse("ns_coefficients", "3 numbers", ns_coefficients_.size());
  if (adjust_lr_fn_ && *adjust_lr_fn_ != "original" && *adjust_lr_fn_ != "match_rms_adamw")
    reporter.refuse("adjust_lr_fn", "None, \"original\" or \"match_rms_adamw\"",
                    "\"" + *adjust_lr_fn_ + "\"");
}

}  // namespace shoestring::optim
