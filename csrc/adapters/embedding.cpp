#include <utility>

#include <ATen/Functions.h>
#include <torch/nn/init.h>

#include <shoestring/embedding.h>
#include <shoestring/nn/embedding.h>
#include <shoestring/placeholder.h>

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
  const auto held = std::exchange(adapters, decltype(adapters)());
  former_.reset();
  const std::vector<int64_t> shape{options.num_embeddings(), options.embedding_dim()};
  Tensor value = options.placeholder() ? placeholder(shape, dtype) : at::empty(shape, dtype);
  if (!options.placeholder()) {
    torch::nn::init::normal_(value);
    if (options.padding_idx().has_value()) value[*options.padding_idx()].zero_();
  }
  weight = register_parameter("weight", value);
  if (!held.is_empty()) freeze();
  for (const auto& item : held)
    adapters.insert(item.key(), std::dynamic_pointer_cast<AdapterImpl>(item.value()->clone()));
  register_adapters();
}

AdaptableLayer::Shapes AdaptableEmbeddingImpl::shapes(const AnyAdapterOptions& adapter_options,
                                                      const std::string& caller,
                                                      const std::string& name) const {
  const auto* own = std::get_if<LoraOptions>(&adapter_options);
  TORCH_CHECK_VALUE(own != nullptr && !own->lora_bias() && !own->changes_base(), caller,
                    ": adapter: expected LoRA or DoRA without "
                    "lora_bias and with init 'default' for an embedding, received other options for ",
                    name);
  Shapes found;
  found.insert("lora_embedding_A", {own->rank(), options.num_embeddings()});
  found.insert("lora_embedding_B", {options.embedding_dim(), own->rank()});
  if (own->dora()) found.insert("lora_magnitude_vector", {options.embedding_dim()});
  return found;
}

AdapterImpl::Tensors AdaptableEmbeddingImpl::start(const AnyAdapterOptions& adapter_options) const {
  const auto& own = std::get<LoraOptions>(adapter_options);
  // Draws and discards two random matrices, because PEFT draws both before it initialises them. Equal seeds
  // then give the same adapter as PEFT.
  at::randn({own.rank(), options.num_embeddings()});
  at::randn({options.embedding_dim(), own.rank()});
  AdapterImpl::Tensors first;
  first.insert("lora_embedding_A", at::zeros({own.rank(), options.num_embeddings()}));
  first.insert("lora_embedding_B", at::randn({options.embedding_dim(), own.rank()}).to(weight.scalar_type()));
  if (own.dora()) first.insert("lora_magnitude_vector", weight.detach().to(adapter_type()).norm(2, 0));
  return first;
}

at::TensorOptions AdaptableEmbeddingImpl::adapter_type() const {
  return weight.options()
      .dtype(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .requires_grad(false);
}

void AdaptableEmbeddingImpl::freeze() {
  weight.requires_grad_(false);
  former_.reset();
}

// Returns DoRA's gain of each output feature: the adapter's magnitude divided by the norm of the feature's
// column of the adapted weight. Backward treats the norm as a constant.
Tensor AdaptableEmbeddingImpl::gain(const std::string& adapter_name) const {
  const AdapterImpl& own = *adapters[adapter_name];
  LoraWeight layer(weight.detach().t());
  layer.lora_A(own["lora_embedding_A"]).lora_B(own["lora_embedding_B"]).scaling(own.lora()->scaling());
  return own["lora_magnitude_vector"] / lora_weight_norm(layer);
}

Tensor AdaptableEmbeddingImpl::lookup(const Tensor& ids, const Tensor& table) const {
  return embedding(ids, table, EmbeddingOptions().padding_idx(options.padding_idx()));
}

Tensor AdaptableEmbeddingImpl::forward(const Tensor& ids) {
  const Tensor base = lookup(ids, weight);
  Tensor total = base;
  for (const auto& name : current()) {
    const AdapterImpl& own = *adapters[name];
    const Tensor low = lookup(ids, own["lora_embedding_A"].t());
    Tensor change = own.lora()->scaling() * at::linear(low, own["lora_embedding_B"]);
    if (own.lora()->dora()) {
      const Tensor multiplied = gain(name);
      change = (multiplied - 1) * base + multiplied * change;
    }
    if (const Tensor chosen = uses(name, ids); chosen.defined()) {
      std::vector<int64_t> shape(static_cast<size_t>(base.dim()), 1);
      shape.front() = ids.size(0);
      change = change * chosen.reshape(shape);
    }
    total = total + change;
  }
  return total.to(base.scalar_type());
}

std::array<double, 2> AdaptableEmbeddingImpl::merge(const MergeOptions& merge_options) {
  TORCH_CHECK(has_adapter(),
              "nn::AdaptableEmbedding: merge: expected a layer with an adapter, received one without");
  const torch::NoGradGuard no_grad;
  const Tensor dense = weight.to(adapter_type()).t();
  Tensor sum = dense.clone();
  for (const auto& name : merge_options.adapter_names().empty() ? active : merge_options.adapter_names()) {
    if (!has_adapter(name)) continue;
    const AdapterImpl& own = *adapters[name];
    Tensor changed = low_rank_sum(
        dense, {{own["lora_embedding_A"], own["lora_embedding_B"], own.lora()->scaling(), Tensor()}});
    if (own.lora()->dora()) changed *= gain(name).unsqueeze(1);
    sum += changed - dense;
  }
  const Tensor value = sum.t().contiguous().to(weight.scalar_type());
  const auto error = merge_error(weight, sum.t(), value);
  const Former former{weight, adapters, active};
  unregister_adapters();
  parameters_.erase("weight");
  weight = register_parameter("weight", value, /*requires_grad=*/false);
  former_.reset();
  if (merge_options.reversible()) former_ = former;
  return error;
}

void AdaptableEmbeddingImpl::unmerge() {
  TORCH_CHECK(
      former_.has_value(),
      "nn::AdaptableEmbedding: unmerge: expected a layer that was merged with reversible=true, received one "
      "without a saved weight");
  const Former former = *std::exchange(former_, std::nullopt);
  const auto device = weight.device();
  parameters_.erase("weight");
  weight = register_parameter("weight", former.weight.detach().to(device), /*requires_grad=*/false);
  adapters = former.adapters;
  active = former.active;
  register_adapters();
  for (auto& item : adapters) item.value()->to(device);
}

void AdaptableEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::AdaptableEmbedding(num_embeddings=" << options.num_embeddings()
         << ", embedding_dim=" << options.embedding_dim();
  for (const auto& item : adapters)
    stream << (item.key() == adapters.front().key() ? ", adapters: " : ", ") << item.key();
  stream << ")";
}

}  // namespace shoestring::nn
