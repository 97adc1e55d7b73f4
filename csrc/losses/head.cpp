#include "losses/head.h"

#include <utility>

#include <ATen/Functions.h>

#include "core/tensors.h"

namespace shoestring::losses {
namespace {

c10::SymInt count(c10::SymIntArrayRef sizes) {
  c10::SymInt product = 1;
  for (const auto& size : sizes) product *= size;
  return product;
}

}  // namespace

// A byte of int8 codes holds one weight. A byte of 4-bit codes holds two weights, or one if the number of
// weights is odd and the byte is the last.
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed) {
  if (!packed) return weight.dim() == 0 ? 0 : weight.sym_size(0);
  if (hidden.dim() == 0 || hidden.sym_size(-1) == 0) return 0;
  return weight.sym_numel() * (weight.scalar_type() == at::kChar ? 1 : 2) / hidden.sym_size(-1);
}

void Head::check(const char* op, bool wide) const {
  const auto argument = [&](const char* name) { return std::string(op) + ": " + prefix + name; };
  const std::string of = prefix + "hidden";
  TORCH_CHECK(hidden.dim() >= 1, argument("hidden"), ": expected shape (..., features), received a scalar");
  TORCH_CHECK(is_supported_float(hidden.scalar_type()), argument("hidden"),
              ": expected fp32, fp64, bf16 or fp16, received ", hidden.scalar_type());
  const auto features = hidden.sym_size(-1);
  const auto check_type = [&](const char* name, const Tensor& t) {
    TORCH_CHECK(t.scalar_type() == hidden.scalar_type() && t.device() == hidden.device(), argument(name),
                ": expected ", of, "'s dtype and device, ", hidden.scalar_type(), " on ", hidden.device(),
                ", received ", t.scalar_type(), " on ", t.device());
  };
  if (absmax) {
    quantization::check_packed(op, weight, *absmax, nested, vocab * features, quant_type, block_size,
                               hidden.device());
  } else {
    if (weight.dim() != 2 || weight.sym_size(0) != vocab || weight.sym_size(1) != features) {
      const std::string classes = prefix.empty() ? "vocab" : c10::str(vocab);
      TORCH_CHECK(false, argument("weight"), ": expected shape (", classes, ", ", features, "), ",
                  prefix.empty() ? "" : "vocab as in weight and ", "features as in ", of, ", received ",
                  weight.sym_sizes());
    }
    // Meta tensors stand for those of any device while torch.compile traces.
    const bool host = hidden.device() == weight.device() && (hidden.is_cpu() || hidden.is_meta());
    const bool rounded =
        wide && host && weight.scalar_type() == at::kFloat && c10::elementSize(hidden.scalar_type()) == 2;
    if (!rounded) check_type("weight", weight);
  }
  if (bias) {
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == vocab, argument("bias"), ": expected shape (", vocab,
                "), received ", bias->sym_sizes());
    check_type("bias", *bias);
  }
  TORCH_CHECK(lora_hidden.has_value() == lora_B.has_value(), op,
              ": lora_hidden and lora_B: expected both or neither");
  if (!lora_hidden) return;
  TORCH_CHECK(lora_hidden->dim() == hidden.dim() &&
                  lora_hidden->sym_sizes().slice(0, lora_hidden->dim() - 1) == tokens(),
              argument("lora_hidden"), ": expected shape (..., rank), tokens as in hidden, received ",
              lora_hidden->sym_sizes());
  TORCH_CHECK(
      lora_B->dim() == 2 && lora_B->sym_size(0) == vocab && lora_B->sym_size(1) == lora_hidden->sym_size(-1),
      argument("lora_B"), ": expected shape (", vocab, ", ", lora_hidden->sym_size(-1),
      "), rank as in lora_hidden, received ", lora_B->sym_sizes());
  for (const auto& [name, t] : {std::pair{"lora_hidden", *lora_hidden}, std::pair{"lora_B", *lora_B}}) {
    TORCH_CHECK(is_supported_float(t.scalar_type()) && t.device() == hidden.device(), argument(name),
                ": expected fp32, fp64, bf16 or fp16 on ", hidden.device(), ", received ", t.scalar_type(),
                " on ", t.device());
  }
}

void Head::check_mask(const char* op, const Mask& mask) const {
  TORCH_CHECK(!mask[kWeight] || !absmax, op, ": weight: expected no gradient of a quantised weight");
}

quantization::BaseWeight Head::base(Backend backend, const char* op, at::ScalarType product) const {
  if (!absmax) return quantization::BaseWeight::dense(weight, product, hidden.scalar_type());
  return quantization::BaseWeight::quantized(
      quantization::PackedReader(backend, op, weight, *absmax, nested, quant_type, block_size),
      vocab.expect_int(), hidden.size(-1), hidden.options().dtype(product));
}

void check_target(const char* op, const Head& head, const Tensor& target) {
  TORCH_CHECK(target.sym_sizes() == head.tokens(), op,
              ": target: expected hidden's shape without its last dimension, ", head.tokens(), ", received ",
              target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, op, ": target: expected int64, received ",
              target.scalar_type(), "; call target.long()");
  TORCH_CHECK(target.device() == head.hidden.device(), op, ": target: expected hidden's device, ",
              head.hidden.device(), ", received ", target.device());
}

void check_factor(const char* op, const char* name, const Head& head, const OptionalTensor& factor) {
  TORCH_CHECK(!factor || factor->dim() == 0 || factor->sym_sizes() == head.tokens(), op, ": ", name,
              ": expected shape () or ", head.tokens(), ", received ", factor->sym_sizes());
}

void check_reduction(const char* op, const std::string& reduction) {
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", op,
              ": reduction: expected 'mean', 'sum' or 'none', received '", reduction, "'");
}

void check_workspace(const char* op, int64_t workspace_mb) {
  TORCH_CHECK(workspace_mb >= 0, op,
              ": workspace_mb: expected a number of MiB, or 0 for the device's default, received ",
              workspace_mb);
}

Tensor flat_rows(const Tensor& t) {
  return t.dim() == 2 ? t : t.reshape_symint({count(t.sym_sizes().slice(0, t.dim() - 1)), t.sym_size(-1)});
}

OptionalTensor flat_rows(const OptionalTensor& t) { return t ? OptionalTensor(flat_rows(*t)) : t; }

Tensor flat(const Tensor& hidden, const Tensor& t) {
  if (!t.defined() || t.dim() == 1 || (t.dim() == 0 && hidden.dim() > 1)) return t;
  return t.reshape_symint({count(hidden.sym_sizes().slice(0, hidden.dim() - 1))});
}

Gradients empty_gradients(const Inputs& inputs, const Mask& mask) {
  Gradients gradients;
  for (int i = 0; i < kInputs; ++i) {
    if (mask[i]) gradients[i] = at::empty_symint(inputs[i]->sym_sizes(), inputs[i]->options());
  }
  return gradients;
}

void view_gradients(Gradients& gradients, const Mask& mask, const Tensor& hidden,
                    const OptionalTensor& lora_hidden) {
  for (int i = 0; i < kInputs; ++i) {
    if (!mask[i]) gradients[i] = Tensor();
  }
  if (hidden.dim() == 2) return;
  if (mask[kHidden]) gradients[kHidden] = gradients[kHidden].view_symint(hidden.sym_sizes());
  if (mask[kLoraHidden])
    gradients[kLoraHidden] = gradients[kLoraHidden].view_symint(lora_hidden->sym_sizes());
}

std::vector<int64_t> rows_that_count(const char* op, int64_t tokens, const OptionalTensor& target,
                                     int64_t ignore_index, std::optional<int64_t> vocab, const char* name) {
  std::vector<int64_t> rows;
  rows.reserve(tokens);
  const Tensor classes = target ? target->contiguous() : Tensor();
  const int64_t* t = target ? classes.const_data_ptr<int64_t>() : nullptr;
  for (int64_t i = 0; i < tokens; ++i) {
    if (t != nullptr && t[i] == ignore_index) continue;
    TORCH_CHECK_INDEX(t == nullptr || !vocab || (t[i] >= 0 && t[i] < *vocab), op, ": ", name,
                      ": expected classes in [0, ", *vocab, ") or ignore_index, ", ignore_index,
                      ", received ", t[i], " at position ", i);
    rows.push_back(i);
  }
  return rows;
}

}  // namespace shoestring::losses
