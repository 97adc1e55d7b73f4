// Runs forward and backward of a module of shoestring::nn, for tests/python/blocks/test_layers_cpp.py:
//
//   layer_file KIND OPTIONS WEIGHTS INPUTS RESULTS
//
// KIND is "attention" or "mlp". OPTIONS is "name:value,..." with the names of the module's options, including
// its sizes. WEIGHTS is a file for load_model. INPUTS is a safetensors file with the input "x", the gradient
// "upstream" of the module's output, and the optional arguments of forward by name. The program writes to
// RESULTS the output "y", and the gradients "grad.NAME" of x and of every parameter. The C++ module and the
// Python module both run in training mode from seed 7.

#include <cstdio>
#include <map>
#include <sstream>
#include <string>

#include <ATen/ATen.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/nn.h>

namespace layer_file {

namespace {

using at::Tensor;
using shoestring::TensorDict;
namespace nn = shoestring::nn;

std::map<std::string, std::string> parse(const std::string& text) {
  std::map<std::string, std::string> options;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    options[part.substr(0, part.find(':'))] = part.substr(part.find(':') + 1);
  }
  return options;
}

nn::Attention attention(const std::map<std::string, std::string>& given) {
  nn::AttentionOptions options(std::stoll(given.at("features")), std::stoll(given.at("num_heads")));
  for (const auto& [key, value] : given) {
    const bool yes = value == "True";
    if (key == "num_kv_heads") options.num_kv_heads(std::stoll(value));
    if (key == "head_dim") options.head_dim(std::stoll(value));
    if (key == "value_dim") options.value_dim(std::stoll(value));
    if (key == "source_features") options.source_features(std::stoll(value));
    if (key == "rotary_dim") options.rotary_dim(std::stoll(value));
    if (key == "left") options.window_size({std::stoll(value), -1});
    if (key == "bias") options.bias(yes);
    if (key == "out_bias") options.out_bias(yes);
    if (key == "causal") options.causal(yes);
    if (key == "qk_norm") options.qk_norm(yes);
    if (key == "interleaved") options.interleaved(yes);
    if (key == "sinks") options.sinks(yes);
    if (key == "softcap") options.softcap(std::stod(value));
    if (key == "scale") options.scale(std::stod(value));
    if (key == "norm_eps") options.norm_eps(std::stod(value));
    if (key == "norm_offset") options.norm_offset(std::stod(value));
    if (key == "dropout_p") options.dropout_p(std::stod(value));
  }
  return nn::Attention(options);
}

nn::GatedMLP mlp(const std::map<std::string, std::string>& given) {
  nn::GatedMLPOptions options(std::stoll(given.at("features")), std::stoll(given.at("hidden_features")));
  for (const auto& [key, value] : given) {
    if (key == "activation") options.activation(value);
    if (key == "bias") options.bias(value == "True");
  }
  return nn::GatedMLP(options);
}

nn::AttentionInput input_of(const TensorDict& tensors) {
  const auto get = [&](const char* name) {
    const Tensor* t = tensors.find(name);
    return t == nullptr ? std::optional<Tensor>() : *t;
  };
  nn::AttentionInput input;
  input.source(get("source"))
      .cos(get("cos"))
      .sin(get("sin"))
      .position_ids(get("position_ids"))
      .bias(get("bias"));
  return input.alibi_slopes(get("alibi_slopes"))
      .cu_seqlens_q(get("cu_seqlens_q"))
      .cu_seqlens_k(get("cu_seqlens_k"));
}

template <class Run>
void run(torch::nn::Module& module, const std::string& weights, const TensorDict& inputs,
         const std::string& results, Run call) {
  shoestring::load_model(module, weights);
  const Tensor x = inputs["x"].clone().requires_grad_();
  at::manual_seed(7);
  const Tensor y = call(x);
  y.backward(inputs["upstream"]);
  TensorDict out;
  out.insert("y", y.detach().contiguous());
  out.insert("grad.x", x.grad().contiguous());
  for (const auto& p : module.named_parameters())
    out.insert("grad." + p.key(), p.value().grad().contiguous());
  shoestring::save_safetensors(results, out);
}

}  // namespace

int program(int argc, char** argv) {
  if (argc != 6) return 2;
  try {
    const auto options = parse(argv[2]);
    const TensorDict inputs = shoestring::load_safetensors(argv[4]);
    if (std::string(argv[1]) == "attention") {
      auto module = attention(options);
      run(*module, argv[3], inputs, argv[5], [&](const Tensor& x) { return module(x, input_of(inputs)); });
    } else {
      auto module = mlp(options);
      run(*module, argv[3], inputs, argv[5], [&](const Tensor& x) { return module(x); });
    }
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}

}  // namespace layer_file
