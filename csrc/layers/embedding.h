#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace shoestring::layers {

constexpr const char* kEmbeddingOp = "embedding";
constexpr const char* kEmbeddingBackwardOp = "_embedding_backward";

using EmbeddingSignature = at::Tensor(const at::Tensor&, const at::Tensor&, std::optional<int64_t>, bool);
using EmbeddingBackwardSignature = at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt,
                                              std::optional<int64_t>, bool);

}  // namespace shoestring::layers
