#include <map>
#include <set>

#include <torch/nn/modules/embedding.h>

#include <shoestring/adapters/lora.h>

#include "adapters/names.h"

namespace shoestring::lora {

std::vector<ParameterGroup> loraplus_param_groups(const torch::nn::Module& module, double lr,
                                                  const LoraPlusOptions& options) {
  TORCH_CHECK_VALUE(options.lr_ratio() >= 1,
                    "lora::loraplus_param_groups: lr_ratio: expected at least 1, received ",
                    options.lr_ratio());
  std::set<const void*> embeddings;
  for (const auto& [name, each] : modules(module)) {
    if (each->as<torch::nn::EmbeddingImpl>() == nullptr && each->as<nn::AdaptableEmbeddingImpl>() == nullptr)
      continue;
    for (const auto& parameter : each->parameters()) embeddings.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<ParameterGroup> groups;
  // Maps (learning rate, has weight decay) to the index of the parameter group in `groups`.
  std::map<std::pair<double, bool>, size_t> places;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const bool vector = parameter.dim() == 1;
    const bool fast = vector || item.key().ends_with(".lora_B");
    const double rate = embeddings.count(parameter.unsafeGetTensorImpl()) > 0 ? options.embedding_lr()
                        : fast                                                ? lr * options.lr_ratio()
                                                                              : lr;
    const auto [group, added] = places.emplace(std::pair(rate, !vector), groups.size());
    if (added) groups.push_back({{}, rate, !vector});
    groups[group->second].params.push_back(parameter);
  }
  TORCH_CHECK_VALUE(
      !groups.empty(),
      "lora::loraplus_param_groups: module: expected parameters that require a gradient, received none");
  return groups;
}

}  // namespace shoestring::lora
