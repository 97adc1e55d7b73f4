// What linear_cross_entropy_rows may be called with.

#include <cmath>

#include "ops/base_weight.h"
#include "ops/linear_cross_entropy.h"
#include "ops/packed.h"

namespace shoestring::cross_entropy {

// A tensor for each class or token: any floating type, or that of the call's loss.
void check_weights(const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape, const Tensor& hidden) {
  if (!weights) return;
  TORCH_CHECK(weights->sym_sizes() == shape && at::isFloatingType(weights->scalar_type()) &&
                  weights->device() == hidden.device(),
              kOp, ": ", name, ": expected a floating tensor of shape ", shape, " on ", hidden.device(), ", received ",
              weights->scalar_type(), " ", weights->sym_sizes(), " on ", weights->device());
}

// hidden and target; the rows' own shape is for Problem.
void check_tokens(const Tensor& hidden, const Tensor& target) {
  TORCH_CHECK(hidden.dim() >= 1, kOp, ": hidden: expected shape (..., features), received a scalar");
  TORCH_CHECK(target.sym_sizes() == hidden.sym_sizes().slice(0, hidden.dim() - 1), kOp,
              ": target: expected hidden's shape without its last dimension, ",
              hidden.sym_sizes().slice(0, hidden.dim() - 1), ", received ", target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, kOp, ": target: expected int64, received ", target.scalar_type(),
              "; call target.long()");
  TORCH_CHECK(at::isFloatingType(hidden.scalar_type()), kOp, ": hidden: expected fp32, fp64, bf16 or fp16, received ",
              hidden.scalar_type());
}

// 4 bits: two codes a byte, and the last byte may have one.
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed) {
  TORCH_CHECK(packed || weight.dim() == 2, kOp, ": weight: expected shape (vocab, ", hidden.sym_size(-1),
              "), features as in hidden, received ", weight.sym_sizes());
  if (!packed) return weight.sym_size(0);
  return weight.sym_numel() * (weight.scalar_type() == at::kChar ? 1 : 2) / hidden.sym_size(-1);
}

namespace {

void check_factor(const char* name, const OptionalTensor& factor, const Tensor& target) {
  TORCH_CHECK(!factor || factor->dim() == 0 || factor->sym_sizes() == target.sym_sizes(), kOp, ": ", name,
              ": expected shape () or ", target.sym_sizes(), ", received ", factor->sym_sizes());
}

void check_weight(const Problem& p) {
  const auto features = p.hidden.sym_size(1);
  if (p.absmax) {
    check_packed(kOp, p.weight, *p.absmax, p.nested, p.vocab * features, p.quant_type, p.block_size, p.hidden.device());
    TORCH_CHECK(!p.mask[kWeight], kOp, ": weight: expected no gradient of a quantised weight");
    return;
  }
  TORCH_CHECK(p.weight.sym_size(1) == features, kOp, ": weight: expected shape (vocab, ", features,
              "), features as in hidden, received ", p.weight.sym_sizes());
  TORCH_CHECK(p.weight.scalar_type() == p.hidden.scalar_type(), kOp, ": weight: expected hidden's dtype, ",
              p.hidden.scalar_type(), ", received ", p.weight.scalar_type());
  TORCH_CHECK(p.weight.device() == p.hidden.device() && p.target.device() == p.hidden.device(), kOp,
              ": weight and target: expected hidden's device, ", p.hidden.device(), ", received ", p.weight.device(),
              " and ", p.target.device());
  if (!p.weight_grad) return;
  TORCH_CHECK(p.weight_grad->sym_sizes() == p.weight.sym_sizes() &&
                  p.weight_grad->scalar_type() == compute_type(p.hidden) && p.weight_grad->device() == p.hidden.device(),
              kOp, ": weight_grad: expected ", compute_type(p.hidden), " of weight's shape, ", p.weight.sym_sizes(),
              ", on ", p.hidden.device(), ", received ", p.weight_grad->scalar_type(), " ", p.weight_grad->sym_sizes(),
              " on ", p.weight_grad->device());
}

void check_bias(const Problem& p) {
  if (!p.bias) return;
  const Tensor& bias = *p.bias;
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == p.vocab, kOp, ": bias: expected shape (", p.vocab, "), received ",
              bias.sym_sizes());
  TORCH_CHECK(bias.scalar_type() == p.hidden.scalar_type() && bias.device() == p.hidden.device(), kOp,
              ": bias: expected hidden's dtype and device, ", p.hidden.scalar_type(), " on ", p.hidden.device(),
              ", received ", bias.scalar_type(), " on ", bias.device());
}

void check_low(const Problem& p) {
  TORCH_CHECK(p.low.has_value() == p.up.has_value(), kOp, ": low and up: expected both or neither");
  if (!p.low) return;
  TORCH_CHECK(p.low->dim() == 2 && p.low->sym_size(0) == p.hidden.sym_size(0), kOp,
              ": low: expected shape (..., rank), tokens as in hidden, received ", p.low->sym_sizes());
  TORCH_CHECK(p.up->dim() == 2 && p.up->sym_size(0) == p.vocab && p.up->sym_size(1) == p.low->sym_size(1), kOp,
              ": up: expected shape (", p.vocab, ", ", p.low->sym_size(1), "), rank as in low, received ",
              p.up->sym_sizes());
  for (const auto& [name, t] : {std::pair{"low", *p.low}, std::pair{"up", *p.up}}) {
    TORCH_CHECK(at::isFloatingType(t.scalar_type()) && t.device() == p.hidden.device(), kOp, ": ", name,
                ": expected fp32, fp64, bf16 or fp16 on ", p.hidden.device(), ", received ", t.scalar_type(), " on ",
                t.device());
  }
}

double finite(const BoxedArguments& arguments, const char* name, const char* expected, bool (*holds)(double)) {
  const double x = arguments.number(name);
  TORCH_CHECK(std::isfinite(x) && holds(x), kOp, ": ", name, ": expected ", expected, ", received ", x);
  return x;
}

Mask mask_of(const c10::IValue& value) {
  const auto list = value.toBoolList();
  Mask mask;
  for (int i = 0; i < kInputs; ++i) mask[i] = list.get(i);
  return mask;
}

}  // namespace

Problem::Problem(const BoxedArguments& a)
    : hidden(a.tensor("hidden")),
      weight(a.tensor("weight")),
      target(a.tensor("target")),
      bias(a.optional("bias")),
      class_weights(a.optional("class_weights")),
      absmax(a.optional("absmax")),
      nested(a.optional("nested")),
      quant_type(a["quant_type"].toStringRef()),
      block_size(a["block_size"].toInt()),
      low(a.optional("low")),
      up(a.optional("up")),
      weight_grad(a.optional("weight_grad")),
      grad_loss(a.optional("grad_loss")),
      grad_lse(a.optional("grad_lse")),
      grad_entropy(a.optional("grad_entropy")),
      ignore_index(a["ignore_index"].toInt()),
      label_smoothing(finite(a, "label_smoothing", "a number in [0, 1)", [](double x) { return x >= 0 && x < 1; })),
      softcap(finite(a, "softcap", "0 (none) or a positive number", [](double x) { return x >= 0; })),
      logit_scale(finite(a, "logit_scale", "a number that is not 0", [](double x) { return x != 0; })),
      z_loss(finite(a, "z_loss", "a number of at least 0", [](double x) { return x >= 0; })),
      filter_eps(finite(a, "filter_eps", "a number in [0, 1)", [](double x) { return x >= 0 && x < 1; })),
      averaged(a["averaged"].toBool()),
      stats(a["stats"].toBool()),
      workspace_mb(a["workspace_mb"].toInt()),
      mask(mask_of(a["output_mask"])),
      vocab(vocab_of(hidden, weight, absmax.has_value())) {
  check_tokens(hidden, target);
  TORCH_CHECK(hidden.dim() == 2, kOp, "_rows: hidden: expected shape (tokens, features), received ", hidden.sym_sizes());
  check_weight(*this);
  TORCH_CHECK(filter_eps == 0 || !absmax, kOp, ": filter_eps: expected 0 with a quantised weight, received ", filter_eps);
  check_bias(*this);
  check_low(*this);
  check_weights("class_weights", class_weights, {vocab}, hidden);
  check_factor("grad_loss", grad_loss, target);
  check_factor("grad_lse", grad_lse, target);
  check_factor("grad_entropy", grad_entropy, target);
  TORCH_CHECK(workspace_mb >= 0, kOp, ": workspace_mb: expected MiB, or 0 for the device's default, received ",
              workspace_mb);
}

}  // namespace shoestring::cross_entropy
