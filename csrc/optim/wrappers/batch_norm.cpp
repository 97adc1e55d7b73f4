#include <shoestring/optim/batch_norm.h>

#include <optional>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>

namespace shoestring::optim {
namespace {

using at::Tensor;

/// A batch norm layer of any dimension. The options and statistics belong to the layer.
struct BatchNorm {
  torch::nn::BatchNormOptions* options;
  std::vector<Tensor> statistics;  // running mean, running variance, number of batches
};

template <class Layer>
bool add_if(torch::nn::Module& module, std::vector<BatchNorm>& layers) {
  auto* layer = dynamic_cast<Layer*>(&module);
  if (layer == nullptr) return false;
  BatchNorm& added = layers.emplace_back(BatchNorm{&layer->options, {}});
  if (layer->options.track_running_stats()) {
    added.statistics = {layer->running_mean, layer->running_var, layer->num_batches_tracked};
  }
  return true;
}

/// Restores modes and momenta when it is destroyed.
class BatchNormGuard {
 public:
  explicit BatchNormGuard(torch::nn::Module& module) {
    modes_.emplace_back(&module, module.is_training());
    for (const auto& m : module.modules(/*include_self=*/false))
      modes_.emplace_back(m.get(), m->is_training());
    for (const auto& [m, mode] : modes_) {
      const bool is_layer = add_if<torch::nn::BatchNorm1dImpl>(*m, layers) ||
                            add_if<torch::nn::BatchNorm2dImpl>(*m, layers) ||
                            add_if<torch::nn::BatchNorm3dImpl>(*m, layers);
      if (is_layer) momenta_.push_back(layers.back().options->momentum());
    }
  }
  ~BatchNormGuard() {
    for (size_t i = 0; i < layers.size(); ++i) layers[i].options->momentum(momenta_[i]);
    // train() sets the mode of a module's children too. Parents come before their children in modes_.
    for (const auto& [m, mode] : modes_) m->train(mode);
  }
  BatchNormGuard(const BatchNormGuard&) = delete;
  BatchNormGuard& operator=(const BatchNormGuard&) = delete;

  std::vector<BatchNorm> layers;

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
  std::vector<std::optional<double>> momenta_;
};

void run_batches(const std::vector<BatchNorm>& layers, const std::function<void()>& forward) {
  for (const BatchNorm& layer : layers) {
    layer.options->momentum(std::nullopt);
    if (layer.statistics.empty()) continue;
    layer.statistics[0].zero_();
    layer.statistics[1].fill_(1);
    layer.statistics[2].zero_();
  }
  forward();
  bool tracks = false, has_batches = false;
  for (const BatchNorm& layer : layers) {
    if (layer.statistics.empty()) continue;
    tracks = true;
    has_batches = has_batches || layer.statistics[2].item<int64_t>() > 0;
  }
  TORCH_CHECK_VALUE(has_batches || !tracks,
                    "update_batch_norm: forward: expected at least one batch through a batch norm layer, "
                    "received none");
}

}  // namespace

void update_batch_norm(torch::nn::Module& module, const std::function<void()>& forward) {
  const at::NoGradGuard no_grad;
  BatchNormGuard guard(module);
  if (guard.layers.empty()) return;
  std::vector<std::vector<Tensor>> before;
  for (const BatchNorm& layer : guard.layers) {
    auto& copies = before.emplace_back();
    for (const Tensor& t : layer.statistics) copies.push_back(t.clone());
  }
  module.train();
  try {
    run_batches(guard.layers, forward);
  } catch (...) {
    for (size_t i = 0; i < before.size(); ++i) {
      for (size_t k = 0; k < before[i].size(); ++k) guard.layers[i].statistics[k].copy_(before[i][k]);
    }
    throw;
  }
}

}  // namespace shoestring::optim
