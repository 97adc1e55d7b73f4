// EVA: initial values of lora_A from the inputs of the layers.
#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/Functions.h>

#include <shoestring/adapters/lora.h>

#include "adapters/names.h"

namespace shoestring::lora {
namespace {

using at::Tensor;
using nn::AdaptableLinearImpl;
using Layers = std::vector<std::pair<std::string, AdaptableLinearImpl*>>;

// Incremental PCA (Ross et al., 2008): the first `count` principal directions of a stream of rows.
class Directions {
 public:
  explicit Directions(int64_t count) : count(count) {}

  void update(const Tensor& inputs) {
    const auto type = inputs.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor rows = inputs.detach().reshape({-1, inputs.size(-1)}).to(type);
    if (rows.size(0) == 0) return;
    const auto n = static_cast<double>(rows.size(0));
    const Tensor mean = rows.mean(0), spread = (rows - mean).square().sum(0);
    Tensor stack = rows - mean;
    if (seen_ == 0) {
      mean_ = mean;
      variance_ = spread;
    } else {
      const Tensor shift = mean - mean_;
      const double weight = seen_ * n / (seen_ + n);
      stack = at::cat({values.unsqueeze(1) * vectors, stack, (std::sqrt(weight) * shift).unsqueeze(0)});
      variance_ = variance_ + spread + weight * shift.square();
      mean_ = mean_ + shift * (n / (seen_ + n));
    }
    seen_ += n;
    const auto [u, all_values, all_vectors] = at::linalg_svd(stack, /*full_matrices=*/false);
    // The sign of a principal direction is arbitrary. As in PEFT, its element of largest magnitude is made
    // positive.
    const Tensor signs = all_vectors.gather(1, all_vectors.abs().argmax(1, /*keepdim=*/true)).sign();
    const int64_t number = std::min(count, all_values.size(0));
    values = all_values.narrow(0, 0, number);
    vectors = (all_vectors * signs).narrow(0, 0, number);
  }

  // Returns the fraction of the total variance of the rows along each principal direction.
  Tensor explained() const {
    const Tensor total = variance_.sum().to(at::kDouble).clamp_min(std::numeric_limits<float>::min());
    return (values.to(at::kDouble).square() / total).cpu();
  }

  const int64_t count;
  Tensor values, vectors;  // (found), (found, features)

 private:
  double seen_ = 0;
  Tensor mean_, variance_;
};

// Runs the module on the caller's batches while its layers report their inputs.
void observe(torch::nn::Module& module, const Layers& layers, std::vector<Directions>& of_layers,
             const std::function<void(const ChooseRows&)>& run) {
  struct Restore {
    torch::nn::Module& module;
    const Layers& layers;
    bool training = module.is_training();
    ~Restore() {
      for (const auto& [name, layer] : layers) layer->observer = nullptr;
      module.train(training);
    }
  } restore{module, layers};
  Tensor chosen;
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].second->observer = [&chosen, &directions = of_layers[i]](const Tensor& x) {
      directions.update(chosen.defined() ? x.index({chosen}) : x);
    };
  }
  module.eval();
  run([&chosen](const Tensor& mask) { chosen = mask.defined() ? mask.to(at::kBool) : mask; });
}

// Returns new ranks, whose sum is that of the old ranks. Over all layers, as many principal directions as
// this sum are chosen, those with the largest fractions of variance. A layer's rank is the number of its
// directions among them. In a tie, the layer whose name comes last is preferred, as in Python.
std::vector<int64_t> distribute(const Layers& layers, const std::vector<Directions>& directions,
                                int64_t sum) {
  std::vector<std::tuple<double, std::string, size_t>> every;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Tensor shares = directions[i].explained();
    for (int64_t k = 0; k < shares.size(0); ++k)
      every.emplace_back(shares[k].item<double>(), layers[i].first, i);
  }
  std::sort(every.rbegin(), every.rend());
  std::vector<int64_t> ranks(layers.size(), 0);
  for (size_t k = 0; k < std::min(every.size(), static_cast<size_t>(sum)); ++k)
    ++ranks[std::get<size_t>(every[k])];
  return ranks;
}

void begin(AdaptableLinearImpl& layer, const std::string& name, int64_t rank, const Tensor& vectors) {
  if (rank == 0) {
    layer.delete_adapter(name);
    return;
  }
  const nn::AdapterImpl& former = *layer.adapters[name];
  const bool trainable = former["lora_A"].requires_grad();
  const std::string bias = former.bias;
  nn::LoraOptions options = *former.lora();
  const auto size = static_cast<double>(rank);
  options.alpha(options.scaling() * (options.rslora() ? std::sqrt(size) : size)).rank(rank);
  nn::AdapterImpl::Tensors values = former.tensors;
  values["lora_A"] = vectors.narrow(0, 0, rank);
  values["lora_B"] = at::zeros({layer.options.out_features(), rank}, vectors.options());
  const auto active = layer.active;
  layer.put_adapter(name, options, values);
  layer.active = active;
  layer.adapters[name]->bias = bias;
  for (auto& parameter : layer.adapters[name]->parameters()) parameter.requires_grad_(trainable);
}

}  // namespace

std::map<std::string, int64_t> initialize_eva(torch::nn::Module& module,
                                              const std::function<void(const ChooseRows&)>& run,
                                              const EvaOptions& options) {
  constexpr const char* kOp = "lora::initialize_eva";
  TORCH_CHECK_VALUE(options.rho() >= 1, kOp, ": rho: expected a number of at least 1, received ",
                    options.rho());
  const torch::NoGradGuard no_grad;
  Layers layers;
  std::vector<Directions> all_directions;
  int64_t sum = 0;
  for (const auto& [name, layer] : all_of<AdaptableLinearImpl>(module)) {
    if (!layer->has_adapter(options.adapter_name())) continue;
    const nn::AdapterImpl& adapter = *layer->adapters[options.adapter_name()];
    if (adapter.lora() == nullptr) continue;
    TORCH_CHECK_VALUE(
        !adapter.lora()->changes_base() && adapter["lora_B"].count_nonzero().item<int64_t>() == 0, kOp,
        ": module: expected lora_B of zeros, as before training, received other values in ", name);
    const int64_t rank = adapter.lora()->rank();
    layers.emplace_back(name, layer);
    all_directions.emplace_back(std::llround(options.rho() * static_cast<double>(rank)));
    sum += rank;
  }
  TORCH_CHECK_VALUE(!layers.empty(), kOp, ": module: expected linear layers with a LoRA adapter '",
                    options.adapter_name(), "', received none");
  observe(module, layers, all_directions, run);
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t received = all_directions[i].values.defined() ? all_directions[i].values.size(0) : 0;
    TORCH_CHECK_VALUE(received == all_directions[i].count, kOp, ": run: expected at least ",
                      all_directions[i].count, " directions in the inputs of ", layers[i].first,
                      ", received ", received, "; give more tokens or a smaller rank");
  }
  const auto ranks = distribute(layers, all_directions, sum);
  std::map<std::string, int64_t> result;
  for (size_t i = 0; i < layers.size(); ++i) {
    begin(*layers[i].second, options.adapter_name(), ranks[i], all_directions[i].vectors);
    result[layers[i].first] = ranks[i];
  }
  return result;
}

}  // namespace shoestring::lora
