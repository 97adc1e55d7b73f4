#include <utility>

#include <ATen/Functions.h>
#include <torch/nn/init.h>

#include <shoestring/adapters/embedding.h>
#include <shoestring/core/placeholder.h>
#include <shoestring/layers/embedding.h>

#include "adapters/low_rank.h"

namespace shoestring::nn {

using at::Tensor;

AdaptableEmbeddingImpl::AdaptableEmbeddingImpl(const AdaptableEmbeddingOptions& options) : options(options) {
  reset();
}

// Creates the embedding's weight and its adapters. clone() calls reset() on the clone as well;
// AdaptableLinearImpl::reset explains why.
void AdaptableEmbeddingImpl::reset() {
  const auto dtype = weight.defined() ? weight.scalar_type() : at::kFloat;
  const auto former_adapters = std::exchange(adapters, decltype(adapters)());
  former_.reset();
  const std::vector<int64_t> shape{options.num_embeddings(), options.embedding_dim()};
  Tensor value = options.placeholder() ? placeholder(shape, dtype) : at::empty(shape, dtype);
  if (!options.placeholder()) {
    torch::nn::init::normal_(value);
    if (options.padding_idx().has_value()) value[*options.padding_idx()].zero_();
  }
  weight = register_parameter("weight", value);
  if (!former_adapters.is_empty()) freeze();
  for (const auto& item : former_adapters)
    adapters.insert(item.key(), std::dynamic_pointer_cast<AdapterImpl>(item.value()->clone()));
  register_adapters();
}

AdaptableLayer::Shapes AdaptableEmbeddingImpl::shapes(const AnyAdapterOptions& adapter_options,
                                                      const std::string& caller,
                                                      const std::string& name) const {
  const auto* lora = std::get_if<LoraOptions>(&adapter_options);
  TORCH_CHECK_VALUE(lora != nullptr && !lora->lora_bias() && !lora->changes_base(), caller,
                    ": adapter: expected LoRA or DoRA without "
                    "lora_bias and with init 'default' for an embedding, received other options for ",
                    name);
  Shapes shapes;
  shapes.insert("lora_embedding_A", {lora->rank(), options.num_embeddings()});
  shapes.insert("lora_embedding_B", {options.embedding_dim(), lora->rank()});
  if (lora->dora()) shapes.insert("lora_magnitude_vector", {options.embedding_dim()});
  return shapes;
}

AdapterImpl::Tensors AdaptableEmbeddingImpl::start(const AnyAdapterOptions& adapter_options) const {
  const auto& lora = std::get<LoraOptions>(adapter_options);
  // Draws and discards two random matrices, because PEFT draws both before it initialises them. Equal seeds
  // then give the same adapter as PEFT.
  at::randn({lora.rank(), options.num_embeddings()});
  at::randn({options.embedding_dim(), lora.rank()});
  AdapterImpl::Tensors first;
  first.insert("lora_embedding_A", at::zeros({lora.rank(), options.num_embeddings()}));
  first.insert("lora_embedding_B",
               at::randn({options.embedding_dim(), lora.rank()}).to(weight.scalar_type()));
  if (lora.dora()) first.insert("lora_magnitude_vector", weight.detach().to(adapter_type()).norm(2, 0));
  return first;
}

std::array<Tensor, 2> AdaptableEmbeddingImpl::factors(const AdapterImpl& adapter) const {
  return {adapter["lora_embedding_A"], adapter["lora_embedding_B"]};
}

void AdaptableEmbeddingImpl::replace(const Tensor& new_weight, const Tensor&) {
  parameters_.erase("weight");
  weight = register_parameter("weight", new_weight, /*requires_grad=*/false);
}

Tensor AdaptableEmbeddingImpl::lookup(const Tensor& ids, const Tensor& table) const {
  return embedding(ids, table, EmbeddingOptions().padding_idx(options.padding_idx()));
}

Tensor AdaptableEmbeddingImpl::forward(const Tensor& ids) {
  if (observer) observer(ids);
  const Tensor base = lookup(ids, weight);
  return composed(base, ids, base.dim() - 1, [&](const AdapterImpl& adapter) {
    return at::linear(lookup(ids, adapter["lora_embedding_A"].t()), adapter["lora_embedding_B"]);
  });
}

void AdaptableEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::AdaptableEmbedding(num_embeddings=" << options.num_embeddings()
         << ", embedding_dim=" << options.embedding_dim();
  for (const auto& item : adapters)
    stream << (item.key() == adapters.front().key() ? ", adapters: " : ", ") << item.key();
  stream << ")";
}

}  // namespace shoestring::nn
