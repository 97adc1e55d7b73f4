// Prefix and prompt tuning: trained tokens before the input of a model.
#include <cmath>

#include <ATen/Functions.h>
#include <torch/nn/init.h>

#include <shoestring/adapters/virtual_tokens.h>

#include "adapters/adapter_files.h"

namespace shoestring::nn {

using at::Tensor;

namespace {

constexpr const char* kEmbeddings = "prompt_embeddings";  // the key of the tokens in PEFT's files

Tensor normal(int64_t rows, int64_t columns) {
  Tensor drawn = at::empty({rows, columns});
  return torch::nn::init::normal_(drawn);
}

void check_sizes(const char* name, std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  for (const auto& [option, size] : sizes)
    TORCH_CHECK_VALUE(size > 0, name, ": ", option, ": expected at least 1, received ", size);
}

void save_tokens(const std::string& directory, const Tensor& values, lora::Json config) {
  TensorDict tensors;
  tensors.insert(kEmbeddings, values.detach().contiguous());
  config.update({{"num_virtual_tokens", values.size(0)},
                 {"num_transformer_submodules", 1},
                 {"task_type", "CAUSAL_LM"},
                 {"base_model_name_or_path", nullptr},
                 {"inference_mode", true}});
  lora::write_adapter(directory, tensors, config);
}

// Returns the tokens in a folder, of which the caller's options determine the shape. `sizes` are the values
// of further fields of the configuration.
Tensor load_tokens(const char* op, const std::string& directory, const char* method, int64_t rows,
                   int64_t columns, std::vector<std::pair<const char*, int64_t>> sizes) {
  sizes.emplace_back("num_virtual_tokens", rows);
  const std::string digest = lora::read_tokens_config(op, directory + "/" + lora::kConfig, method, sizes);
  const SafetensorsFile file(directory + "/" + lora::kWeights);
  lora::check_digest(file, digest);
  const auto& entries = file.entries();
  const bool one = entries.size() == 1 && entries.front().name == kEmbeddings;
  TORCH_CHECK_VALUE(one, op, ": ", file.path(), ": expected the tensor ", kEmbeddings,
                    " alone, received other tensors");
  const Tensor values = file.load(kEmbeddings);
  TORCH_CHECK_VALUE(values.is_floating_point() && values.sizes() == at::IntArrayRef({rows, columns}), op,
                    ": ", file.path(), ": ", kEmbeddings, ": expected shape [", rows, ", ", columns,
                    "] of floating point, received ", values.sizes(), " of ", values.scalar_type());
  return values;
}

}  // namespace

Tensor before(const Tensor& t, int64_t tokens, const at::Scalar& value) {
  TORCH_CHECK_VALUE(t.dim() == 2, "nn::before: t: expected shape (batch, n), received ", t.sizes());
  return at::cat({at::full({t.size(0), tokens}, value, t.options()), t}, 1);
}

PromptTokensImpl::PromptTokensImpl(const PromptTokensOptions& options) : options(options) {
  check_sizes("nn::PromptTokens", {{"tokens", options.tokens()}, {"features", options.features()}});
  reset();
}

void PromptTokensImpl::reset() {
  embedding = register_parameter("embedding", normal(options.tokens(), options.features()));
}

Tensor PromptTokensImpl::forward(const Tensor& embedded) {
  TORCH_CHECK_VALUE(embedded.dim() == 3 && embedded.size(2) == options.features(),
                    "nn::PromptTokens: embedded: expected shape (batch, n, ", options.features(),
                    "), received ", embedded.sizes());
  const Tensor tokens = embedding.to(embedded.scalar_type());
  return at::cat({tokens.expand({embedded.size(0), -1, -1}), embedded}, 1);
}

void PromptTokensImpl::save(const std::string& directory) const {
  save_tokens(directory, embedding, {{"peft_type", "PROMPT_TUNING"}, {"token_dim", options.features()}});
}

void PromptTokensImpl::load(const std::string& directory) {
  const Tensor values = load_tokens("nn::PromptTokens: load", directory, "PROMPT_TUNING", options.tokens(),
                                    options.features(), {{"token_dim", options.features()}});
  const torch::NoGradGuard no_grad;
  embedding.copy_(values);
}

void PromptTokensImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::PromptTokens(tokens=" << options.tokens() << ", features=" << options.features()
         << ")";
}

PrefixTokensImpl::PrefixTokensImpl(const PrefixTokensOptions& options) : options(options) {
  check_sizes("nn::PrefixTokens", {{"tokens", options.tokens()},
                                   {"layers", options.layers()},
                                   {"heads", options.heads()},
                                   {"head_dim", options.head_dim()},
                                   {"hidden_size", options.hidden_size().value_or(1)}});
  reset();
}

void PrefixTokensImpl::reset() {
  const int64_t features = options.heads() * options.head_dim(), full = 2 * options.layers() * features;
  const Tensor drawn = normal(options.tokens(), options.projection() ? features : full);
  const bool zero = options.zero() && !options.projection();
  embedding = register_parameter("embedding", zero ? at::zeros_like(drawn) : drawn);
  if (!options.projection()) return;
  const int64_t hidden = options.hidden_size().value_or(features);
  first = register_module("first", torch::nn::Linear(features, hidden));
  last = register_module("last", torch::nn::Linear(hidden, full));
  if (options.zero()) {
    torch::nn::init::zeros_(last->weight);
    torch::nn::init::zeros_(last->bias);
  }
}

Tensor PrefixTokensImpl::values() { return first ? last(at::tanh(first(embedding))) : embedding; }

std::vector<PrefixTokensImpl::Layer> PrefixTokensImpl::forward(int64_t batch, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(batch >= 0, "nn::PrefixTokens: batch: expected at least 0, received ", batch);
  // (tokens, layers, 2, heads, head_dim) -> (layers, 2, heads, tokens, head_dim); the dimension of size 2
  // holds key and value
  const Tensor parts = values()
                           .to(dtype)
                           .view({options.tokens(), options.layers(), 2, options.heads(), options.head_dim()})
                           .permute({1, 2, 3, 0, 4});
  std::vector<Layer> layers;
  for (const Tensor& pair : parts.unbind(0))
    layers.push_back({pair[0].expand({batch, -1, -1, -1}), pair[1].expand({batch, -1, -1, -1})});
  return layers;
}

void PrefixTokensImpl::save(const std::string& directory) const {
  const torch::NoGradGuard no_grad;
  const Tensor computed = const_cast<PrefixTokensImpl&>(*this).values();
  save_tokens(directory, computed,
              {{"peft_type", "PREFIX_TUNING"},
               {"token_dim", options.heads() * options.head_dim()},
               {"num_layers", options.layers()},
               {"num_attention_heads", options.heads()},
               {"prefix_projection", options.projection()},
               {"encoder_hidden_size", options.projection() ? lora::Json(options.hidden_size().value_or(
                                                                  options.heads() * options.head_dim()))
                                                            : lora::Json()}});
}

void PrefixTokensImpl::load(const std::string& directory) {
  const int64_t features = options.heads() * options.head_dim();
  // The shape alone does not say how the values are divided among layers and heads.
  const Tensor values = load_tokens(
      "nn::PrefixTokens: load", directory, "PREFIX_TUNING", options.tokens(), 2 * options.layers() * features,
      {{"num_layers", options.layers()}, {"num_attention_heads", options.heads()}, {"token_dim", features}});
  const torch::NoGradGuard no_grad;
  if (!first) {
    embedding.copy_(values);
    return;
  }
  const bool trained = embedding.requires_grad();
  const auto type = embedding.options().requires_grad(false);
  for (const char* name : {"first", "last"}) unregister_module(name);
  first = last = nullptr;
  options.projection(false);
  parameters_.erase("embedding");
  embedding = register_parameter("embedding", values.to(type, false, /*copy=*/true), trained);
}

void PrefixTokensImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::PrefixTokens(tokens=" << options.tokens() << ", layers=" << options.layers()
         << ", heads=" << options.heads() << ", head_dim=" << options.head_dim();
  if (options.projection()) stream << ", projection=true";
  stream << ")";
}

}  // namespace shoestring::nn
