#pragma once

#include <string>

#include <torch/nn/modules/linear.h>

#include <shoestring/adapters/lora.h>

using at::Tensor;
using shoestring::lora::ApplyOptions;
using shoestring::nn::AdaptableLinear;
using shoestring::nn::LoraOptions;

// A model for adapter tests. Adapters can be added to its two linear layers of shoestring::nn, but not to its
// head, a torch::nn::Linear.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  AdaptableLinear up{nullptr}, down{nullptr};
  torch::nn::Linear head{nullptr};
  NetImpl() { reset(); }
  void reset() override {
    up = register_module("up_proj", AdaptableLinear(64, 128));
    down = register_module("down_proj", AdaptableLinear(128, 64));
    head = register_module("head", torch::nn::Linear(64, 5));
  }
  Tensor forward(const Tensor& x) { return head(down(at::relu(up(x)))); }
};
TORCH_MODULE(Net);

// Changes the parameters of an adapter randomly, as training would.
inline void change(shoestring::nn::AdapterImpl& adapter) {
  torch::NoGradGuard no_grad;
  if (adapter.has("lora_B")) adapter["lora_B"].normal_(0, 0.1);
  if (adapter.has("lora_magnitude_vector")) adapter["lora_magnitude_vector"].mul_(1.5);
}

inline Net make(const ApplyOptions& options) {
  torch::manual_seed(4);
  Net net;
  shoestring::lora::apply(*net, options);
  for (AdaptableLinear layer : {net->up, net->down}) {
    for (auto& item : layer->adapters) change(*item.value());
  }
  return net;
}

inline Tensor& lora_A(AdaptableLinear& layer, const char* name = "default") {
  return (*layer->adapters[name])["lora_A"];
}
inline Tensor& lora_B(AdaptableLinear& layer, const char* name = "default") {
  return (*layer->adapters[name])["lora_B"];
}

inline ApplyOptions options(const char* quantize, bool nested = false, bool dora = false) {
  return ApplyOptions().quantize(quantize).double_quant(nested).adapter(
      LoraOptions().rank(4).alpha(8).dora(dora));
}
