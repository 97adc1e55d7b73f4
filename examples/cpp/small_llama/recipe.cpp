#include "recipe.h"

#include <torch/nn/utils/clip_grad.h>

#include <algorithm>

namespace optim = shoestring::optim;
using at::Tensor;
using shoestring::callbacks::OnStep;

namespace {

// Returns the matrices of the blocks, or all other parameters.
std::vector<Tensor> parameters_of(const SmallLlama& model, bool hidden) {
  std::vector<Tensor> found;
  for (const auto& item : model->named_parameters()) {
    const bool is_hidden = item.key().rfind("layers.", 0) == 0 && item.value().dim() == 2;
    if (is_hidden == hidden) found.push_back(item.value());
  }
  return found;
}

optim::Schedule rate(const RecipeOptions& o) {
  return optim::schedules::wsd(
      optim::ScheduleOptions(o.steps).warmup(std::min(o.warmup, o.steps)).decay(0.3));
}

}  // namespace

Recipe::Recipe(SmallLlama model, const RecipeOptions& o)
    : averages(*model, optim::AveragesOptions("ema").decay(o.ema)),
      muon(parameters_of(model, true),
           optim::MuonOptions(o.lr).weight_decay(0.1).adjust_lr_fn("match_rms_adamw")),
      adamw(parameters_of(model, false), optim::AdamWOptions(o.lr).betas({0.9, 0.95}).weight_decay(0)),
      guard({&muon, &adamw}, optim::GuardOptions("skip").spike(6)), model_(std::move(model)),
      muon_rate_(muon, {{"lr", rate(o)}}), adamw_rate_(adamw, {{"lr", rate(o)}}) {
  callbacks_.add("rate0", OnStep([this] { muon_rate_.step(); }, muon_rate_));
  callbacks_.add("rate1", OnStep([this] { adamw_rate_.step(); }, adamw_rate_));
  callbacks_.add("averages", OnStep([this] { averages.update(); }, averages));
}

void Recipe::step(shoestring::callbacks::Run& run) {
  torch::nn::utils::clip_grad_norm_(model_->parameters(), 1.0);
  guard.step(run.loss);
  muon.zero_grad();
  adamw.zero_grad();
  ++run.step;
  callbacks_.on_step(run);
}

shoestring::TrainingRun Recipe::training_run() {
  return {
      shoestring::training_tensors(*model_), {&muon, &adamw}, {{"callbacks", callbacks_}, {"guard", guard}}};
}

void Recipe::save(const std::string& path, int64_t step, const std::map<std::string, std::string>& facts) {
  auto run = training_run();
  run.step = step;
  run.facts = facts;
  shoestring::save_training(path, run);
}

int64_t Recipe::load(const std::string& path, const std::map<std::string, std::string>& facts) {
  auto run = training_run();
  run.facts = facts;
  shoestring::load_training(path, run);
  return run.step;
}
