#pragma once

// Saves the arguments of linear_cross_entropy and linear_distillation for backward, and restores them there.

#include <torch/csrc/autograd/custom_function.h>

#include "losses/head.h"

namespace shoestring::losses {

/// Hands out the saved tensors of an autograd node one after the other, in the order in which they were
/// saved.
class SavedTensors {
 public:
  explicit SavedTensors(torch::autograd::variable_list tensors) : tensors_(std::move(tensors)) {}
  at::Tensor next() { return tensors_[next_++]; }
  std::optional<at::Tensor> next_optional() {
    const at::Tensor t = next();
    return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
  }

 private:
  torch::autograd::variable_list tensors_;
  size_t next_ = 0;
};

/// Returns a mask of the head's inputs that require a gradient.
inline Mask require_grad(const Head& head) {
  const auto inputs = head.inputs();
  Mask mask;
  for (int i = 0; i < kInputs; ++i) mask[i] = inputs[i] && inputs[i]->requires_grad();
  return mask;
}

inline void save_mask(torch::autograd::AutogradContext* ctx, const Mask& mask) {
  ctx->saved_data["mask"] = list_of(mask);
}
inline Mask saved_mask(torch::autograd::AutogradContext* ctx) { return mask_of(ctx->saved_data["mask"]); }

inline void save_options(torch::autograd::AutogradContext* ctx, const NamedArguments& options) {
  for (const auto& [name, value] : options) ctx->saved_data[name] = value;
}
template <size_t size>
NamedArguments saved_options(torch::autograd::AutogradContext* ctx, const char* const (&names)[size]) {
  NamedArguments options;
  for (const char* name : names) options.emplace_back(name, ctx->saved_data[name]);
  return options;
}

/// save_head() appends the head's tensors to `saved`, the tensors to save for backward. saved_head() reads
/// them in the same order.
inline void save_head(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list& saved,
                      const Head& head) {
  saved.insert(saved.end(), {head.hidden, head.weight});
  for (const auto& t : {head.bias, head.absmax, head.nested, head.lora_hidden, head.lora_B})
    saved.push_back(t.value_or(at::Tensor()));
  ctx->saved_data[head.prefix + "quant_type"] = head.quant_type;
  ctx->saved_data[head.prefix + "block_size"] = head.block_size;
  ctx->saved_data[head.prefix + "vocab"] = head.vocab;
}
inline void saved_head(torch::autograd::AutogradContext* ctx, SavedTensors& saved, Head& head,
                       const std::string& prefix = "") {
  head.prefix = prefix;
  head.hidden = saved.next(), head.weight = saved.next();
  for (auto* t : {&head.bias, &head.absmax, &head.nested, &head.lora_hidden, &head.lora_B})
    *t = saved.next_optional();
  head.quant_type = ctx->saved_data[prefix + "quant_type"].toStringRef();
  head.block_size = ctx->saved_data[prefix + "block_size"].toInt();
  head.vocab = ctx->saved_data[prefix + "vocab"].toSymInt();
}

}  // namespace shoestring::losses
