#include "optimizers.h"

#include <ATen/ops/ones_like.h>
#include <shoestring/optim.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <concepts>
#include <limits>

namespace optim = shoestring::optim;
using at::Tensor;
using shoestring::lora::ParameterGroup;

namespace {

// Returns an optimizer of shoestring, or null if it is LibTorch's.
optim::LowMemoryOptimizer* ours(const std::unique_ptr<torch::optim::Optimizer>& optimizer) {
  return dynamic_cast<optim::LowMemoryOptimizer*>(optimizer.get());
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const std::vector<ParameterGroup>& groups, const LoopOptions& o,
                                              const Processes& processes, Options defaults) {
  defaults.weight_decay(o.weight_decay);
  if constexpr (std::derived_from<Options, optim::LowMemoryOptions>) {
    const auto dash = o.weights.find('-');
    defaults.state_format(o.optimizer_state)
        .weight_rounding(dash == std::string::npos ? "nearest" : o.weights.substr(dash + 1));
  }
  std::vector<torch::optim::OptimizerParamGroup> own;
  for (const auto& group : groups) {
    auto options = std::make_unique<Options>(defaults);
    options->lr(group.lr);
    if (!group.weight_decay) options->weight_decay(0);
    std::vector<Tensor> params;
    for (const Tensor& p : group.params) params.push_back(processes.part(p));
    own.emplace_back(params, std::move(options));
  }
  return std::make_unique<Optimizer>(own, defaults);
}

std::unique_ptr<torch::optim::Optimizer> make(const std::string& name,
                                              const std::vector<ParameterGroup>& groups, const LoopOptions& o,
                                              const Processes& all) {
  if (o.baseline) {
    return make<torch::optim::AdamW>(groups, o, all, torch::optim::AdamWOptions(o.lr).betas(o.betas));
  }
  if (name == "adamw") return make<optim::AdamW>(groups, o, all, optim::AdamWOptions(o.lr).betas(o.betas));
  if (name == "lion") return make<optim::Lion>(groups, o, all, optim::LionOptions(o.lr));
  if (name == "sgd") return make<optim::SGD>(groups, o, all, optim::SGDOptions(o.lr));
  if (name == "ademamix") return make<optim::AdEMAMix>(groups, o, all, optim::AdEMAMixOptions(o.lr));
  if (name == "schedule-free-adamw")
    return make<optim::ScheduleFreeAdamW>(groups, o, all, optim::ScheduleFreeAdamWOptions(o.lr));
  if (name == "lamb") return make<optim::LAMB>(groups, o, all, optim::LAMBOptions(o.lr));
  if (name == "adafactor") return make<optim::Adafactor>(groups, o, all, optim::AdafactorOptions(o.lr));
  if (name == "came") return make<optim::CAME>(groups, o, all, optim::CAMEOptions(o.lr));
  // With this adjustment, Muon takes the learning rate of AdamW.
  return make<optim::Muon>(groups, o, all, optim::MuonOptions(o.lr).adjust_lr_fn("match_rms_adamw"));
}

// Splits parameter groups into those of Muon and those of AdamW.
std::vector<std::pair<std::string, std::vector<ParameterGroup>>> split_for_muon(
    const std::vector<ParameterGroup>& groups, const std::vector<Tensor>& ends) {
  std::vector<std::pair<std::string, std::vector<ParameterGroup>>> split{{"muon", {}}, {"adamw", {}}};
  for (auto& [name, own] : split) {
    for (const auto& group : groups) {
      ParameterGroup part{{}, group.lr, group.weight_decay};
      for (const Tensor& p : group.params) {
        const bool end = std::any_of(ends.begin(), ends.end(), [&](const Tensor& e) { return e.is_same(p); });
        if ((p.dim() == 2 && !end) == (name == "muon")) part.params.push_back(p);
      }
      if (!part.params.empty()) own.push_back(std::move(part));
    }
  }
  std::erase_if(split, [](const auto& one) { return one.second.empty(); });
  return split;
}

// Returns the schedule of --schedule, with the warm-up, as factors of the highest learning rate.
optim::Schedule learning_rate(const LoopOptions& o) {
  std::string name = o.schedule;
  std::replace(name.begin(), name.end(), '-', '_');
  auto options = optim::ScheduleOptions().warmup(std::min(o.warmup, o.steps));
  if (name != "constant" && name != "inverse_sqrt") options.steps(o.steps);
  return optim::schedules::by_name(name, options);
}

}  // namespace

Optimizers::Optimizers(const std::vector<ParameterGroup>& groups, const std::vector<Tensor>& ends,
                       const LoopOptions& options, const Processes& processes)
    : options_(options), processes_(processes), schedule_(learning_rate(options)),
      scaler_(optim::GradScalerOptions().enabled(options.scales_loss())) {
  if (options.optimizer == "muon") {
    for (const auto& [name, own] : split_for_muon(groups, ends))
      all_.push_back(make(name, own, options, processes));
  } else {
    all_.push_back(make(options.optimizer, groups, options, processes));
  }
  for (const auto& optimizer : all_) {
    for (const auto& group : optimizer->param_groups()) highest_.push_back(group.options().get_lr());
    if (options.offload != "none") ours(optimizer)->set_offload(options.offload);
  }
  if (clips()) {
    ours(all_.front())
        ->set_max_grad_norm(options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity());
  }
}

void Optimizers::begin_step(int64_t step) {
  size_t number = 0;
  for (const auto& optimizer : all_) {
    for (auto& group : optimizer->param_groups())
      group.options().set_lr(highest_[number++] * schedule_(step));
  }
}

void Optimizers::step_in_backward() { ours(all_.front())->set_step_in_backward(true); }

std::shared_ptr<void> Optimizers::accumulate() {
  return options_.step_in_backward ? ours(all_.front())->accumulate() : nullptr;
}

void Optimizers::backward(const Tensor& loss, const Tensor& found_inf, bool is_last) {
  // GradScaler skips a step whose gradients are not finite. The quotient is the loss, or if found_inf is 1,
  // it has the derivative 1 / 0, which makes every gradient infinite or NaN.
  processes_.backward(scaler_.is_enabled() ? scaler_.scale(loss / (1 - found_inf)) : loss, is_last);
}

void Optimizers::unscale() {
  for (const auto& optimizer : all_) scaler_.unscale_(*optimizer);
}

void Optimizers::step(const Tensor& found_inf) {
  if (scaler_.is_enabled()) {
    for (const auto& optimizer : all_) scaler_.step(*optimizer);
    return scaler_.update();
  }
  for (const auto& optimizer : all_) {
    auto* own = ours(optimizer);
    if (own != nullptr && !options_.step_in_backward) {
      // If the optimizer clips, nobody has looked at the gradients yet. With a scale, the step does.
      own->scaled_step(clips() ? at::ones_like(found_inf) : Tensor(), found_inf);
    } else if (own != nullptr || found_inf.item<float>() == 0) {
      optimizer->step();
    }
  }
}

bool Optimizers::clips() const { return options_.step_in_backward || processes_.splits_gradients(); }

Tensor Optimizers::norm_of_step() const { return clips() ? ours(all_.front())->grad_norm() : Tensor(); }

void Optimizers::zero_grad(bool set_to_none) {
  for (const auto& optimizer : all_) {
    // LibTorch's function refuses gradients that are views of the buckets in which processes add them up.
    auto* own = ours(optimizer);
    own != nullptr ? own->zero_grad(set_to_none) : optimizer->zero_grad(set_to_none);
  }
}

void Optimizers::set_training(bool training) {
  auto* own = dynamic_cast<optim::ScheduleFreeAdamW*>(all_.front().get());
  if (own != nullptr) training ? own->train() : own->eval();
}

std::vector<torch::optim::Optimizer*> Optimizers::all() const {
  std::vector<torch::optim::Optimizer*> all;
  for (const auto& optimizer : all_) all.push_back(optimizer.get());
  return all;
}
