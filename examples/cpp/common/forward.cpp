#include "forward.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scalar_tensor.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/ops.h>

#include <algorithm>
#include <cstdio>

#include "device.h"
#include "planned.h"

using at::Tensor;

namespace {

void say(const shoestring::TrainingPlan& plan) {
  const auto kept = std::count_if(plan.checkpoints.begin(), plan.checkpoints.end(),
                                  [](const auto& layer) { return layer.treatment == "keep"; });
  std::printf(
      "plan: %lld x %lld rows, %s, %s state, %lld of %lld layers keep their activations; predicted %lld MiB "
      "and %.3g s a step\n",
      static_cast<long long>(plan.accumulate), static_cast<long long>(plan.micro_batch),
      plan.precision.c_str(), plan.optimizer_state.c_str(), static_cast<long long>(kept),
      static_cast<long long>(plan.checkpoints.size()), static_cast<long long>(plan.peak_bytes >> 20),
      plan.seconds);
}

Tensor inputs_of(const Tensor& rows) { return rows.narrow(1, 0, rows.size(1) - 1); }

}  // namespace

Forward::Forward(const LlamaForCausalLM& model, const LoopOptions& options, at::Device device,
                 const Processes& processes, shoestring::OffloadWeights* weights)
    : model_(model), options_(options), device_(device), processes_(processes), weights_(weights) {}

// Returns the model's steps from tokens to hidden states, with each layer under its checkpoint, and with its
// weights on the device.
std::vector<shoestring::BlockFunction> Forward::layers(int64_t tokens) {
  auto all = model_->model->functions(tokens);
  if (weights_ != nullptr) {
    all.front() = [this](const Tensor& tokens) {
      return weights_->embedding(model_->model->embed_tokens->weight, tokens);
    };
  }
  for (int64_t i = 0; i < model_->config.layers; ++i) {
    auto& layer = all[static_cast<size_t>(i) + 1];
    if (options_.activations == "recompute") {
      layer = [forward = layer](const Tensor& x) { return shoestring::checkpoint(forward, x); };
    }
    // The checkpoint is inside, so that backward brings the weights before it recomputes the layer.
    if (weights_ != nullptr)
      layer = [this, i, forward = layer](const Tensor& x) { return weights_->run(i, x, forward); };
  }
  return all;
}

// Returns the whole forward pass as functions to run one after the other. The last function returns the loss.
std::vector<shoestring::BlockFunction> Forward::functions(const Tensor& rows) {
  const int64_t tokens = rows.size(1) - 1;
  auto all = layers(tokens);
  all.emplace_back([weight = model_->output_weight(), target = rows.narrow(1, 1, tokens),
                    baseline = options_.baseline, workspace = options_.workspace_mb](const Tensor& hidden) {
    if (baseline) {
      const Tensor logits = at::linear(hidden, weight).to(at::kFloat);
      return at::cross_entropy_loss(logits.flatten(0, 1), target.flatten());
    }
    // shoestring: the loss never stores the logits.
    return shoestring::linear_cross_entropy(hidden, weight, target, std::nullopt,
                                            shoestring::LinearCrossEntropyOptions().workspace_mb(workspace));
  });
  // The layers are the first blocks, and then come the norm and the embedding, which is also the output
  // layer.
  const auto embedding = static_cast<int64_t>(all.size()) - 2;
  for (int64_t i = 0; processes_.splits_weights() && i <= embedding + 1; ++i) {
    const int64_t block = i == 0 || i > embedding ? embedding : i - 1;
    auto& function = all[static_cast<size_t>(i)];
    function = [this, block, forward = function](const Tensor& x) {
      return processes_.run(block, x, forward);
    };
  }
  return all;
}

void Forward::begin_training(const Tensor& rows) {
  plan_ = planned_layers(options_, model_->config.layers);
  if (options_.activations == "offload" || (plan_ && offloads(*plan_))) {
    auto exclude = model_->parameters();
    for (const Tensor& buffer : model_->buffers()) exclude.push_back(buffer);
    offload_ = std::make_unique<shoestring::OffloadActivations>(
        shoestring::OffloadActivationsOptions().device(device_.str()), exclude);
  }
  const int64_t budget = options_.budget_bytes(), layers = model_->config.layers;
  if (plan_) say(*options_.training_plan);
  if (budget == 0) return;
  const Tensor moved = rows.to(device_);
  const auto all = functions(moved);
  std::vector<int64_t> kinds(all.size(), 1);  // all layers have the same cost, so only one is measured
  kinds.front() = 0;
  for (size_t i = static_cast<size_t>(layers) + 1; i < kinds.size(); ++i) kinds[i] = static_cast<int64_t>(i);
  const auto guard = autocast(options_, device_);
  plan_ = shoestring::plan_sequential(all, inputs_of(moved), budget, kinds, offload_.get());
  const auto count = [&](auto... names) {
    return std::count_if(plan_->names.begin() + 1, plan_->names.begin() + 1 + layers,
                         [&](const std::string& name) { return ((name == names) || ...); });
  };
  const auto offloaded = count("offload");
  std::printf(
      "activations within %lld MiB: %lld of %lld layers are recomputed, %lld offloaded; predicted %lld MiB "
      "and "
      "%.3g s a micro-batch\n",
      static_cast<long long>(budget >> 20), static_cast<long long>(layers - count("keep") - offloaded),
      static_cast<long long>(layers), static_cast<long long>(offloaded),
      static_cast<long long>(plan_->peak_bytes >> 20), plan_->seconds);
}

Tensor Forward::loss(const Tensor& rows) {
  const Tensor moved = rows.to(device_, rows.scalar_type(), /*non_blocking=*/true);
  const auto all = functions(moved);
  const auto guard = autocast(options_, device_);
  const Tensor loss = [&] {
    if (!at::GradMode::is_enabled()) return run_layers(all, inputs_of(moved));
    if (plan_) return shoestring::checkpoint_sequential(all, *plan_, inputs_of(moved), offload_.get());
    if (!offload_) return run_layers(all, inputs_of(moved));
    const auto scope = offload_->scope();
    return run_layers(all, inputs_of(moved));
  }();
  const Tensor of_routers = model_->model->take_router_loss();
  return of_routers.defined() ? loss + of_routers : loss;
}

Tensor Forward::run_layers(const std::vector<shoestring::BlockFunction>& functions, Tensor x) {
  const bool trains = at::GradMode::is_enabled();
  for (size_t i = 0; i < functions.size(); ++i) {
    const bool is_layer = i > 0 && i <= static_cast<size_t>(model_->config.layers);
    x = functions[i](x);
    if (trains && offload_ && is_layer) offload_->mark();
  }
  return x;
}

Tensor Forward::logits(const Tensor& tokens) {
  const torch::NoGradGuard no_grad;
  const auto guard = autocast(options_, device_);
  const Tensor& weight = model_->output_weight();
  const Tensor hidden = run_layers(layers(tokens.size(1)), tokens.to(device_));
  if (weights_ == nullptr) return at::linear(hidden, weight);
  constexpr int64_t kRows = 4096;
  std::vector<Tensor> parts;
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const Tensor rows = at::arange(begin, std::min(begin + kRows, weight.size(0)));
    parts.push_back(at::linear(hidden, weights_->embedding(weight, rows)));
  }
  return at::cat(parts, -1);
}

double Forward::validate(const Blocks& blocks) {
  const torch::NoGradGuard no_grad;
  const int64_t count = std::min(blocks.count, options_.eval_batches * options_.batch_size);
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += options_.batch_size) {
    std::vector<int64_t> numbers;
    for (int64_t i = begin; i < std::min(begin + options_.batch_size, count); ++i) numbers.push_back(i);
    auto own = processes_.share(numbers);
    const auto weight = static_cast<double>(own.size());
    // All processes run the model equally often, also one without rows of its own.
    if (own.empty()) own.push_back(begin);
    total += loss(blocks.rows(own)).item<double>() * weight;
  }
  const auto mean = processes_.mean(at::scalar_tensor(total, at::kDouble)).item<double>();
  return mean * static_cast<double>(processes_.count()) / static_cast<double>(count);
}
