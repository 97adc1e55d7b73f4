#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/adapters/adapter.h>
#include <shoestring/core/export.h>

namespace shoestring::nn {

struct AdaptableEmbeddingOptions {
  AdaptableEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}
  TORCH_ARG(int64_t, num_embeddings);
  TORCH_ARG(int64_t, embedding_dim);
  /// Index whose embedding starts at zero and gets no gradient.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// The weight allocates no memory until load_model fills it; see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// torch::nn::Embedding, with the same parameter name, that also accepts LoRA and DoRA adapters. The dropout
/// of an adapter is ignored. lora_embedding_A is (rank, num_embeddings) and starts at zero; lora_embedding_B
/// is (embedding_dim, rank). DoRA's magnitude is (embedding_dim): one norm per output feature, over all
/// tokens of the vocabulary.
class SHOESTRING_API AdaptableEmbeddingImpl : public torch::nn::Cloneable<AdaptableEmbeddingImpl>,
                                              public LowRankLayer {
 public:
  AdaptableEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : AdaptableEmbeddingImpl(AdaptableEmbeddingOptions(num_embeddings, embedding_dim)) {}
  explicit AdaptableEmbeddingImpl(const AdaptableEmbeddingOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Maps integer ids (...) to embeddings (..., embedding_dim).
  at::Tensor forward(const at::Tensor& ids);

  Shapes shapes(const AnyAdapterOptions& options, const std::string& caller,
                const std::string& name) const override;

  AdaptableEmbeddingOptions options;

 private:
  AdapterImpl::Tensors start(const AnyAdapterOptions& adapter_options) const override;
  at::Tensor matrix(const at::Tensor& value) const override { return value.t(); }
  at::Tensor folded(const at::Tensor& value) const override { return value.t(); }
  std::array<at::Tensor, 2> factors(const AdapterImpl& adapter) const override;
  void replace(const at::Tensor& new_weight, const at::Tensor& new_bias) override;
  at::Tensor lookup(const at::Tensor& ids, const at::Tensor& table) const;
};
TORCH_MODULE(AdaptableEmbedding);

}  // namespace shoestring::nn
