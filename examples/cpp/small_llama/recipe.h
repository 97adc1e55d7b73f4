#pragma once

#include <shoestring/optim.h>
#include <shoestring/runs/callbacks.h>
#include <shoestring/runs/training.h>

#include <map>
#include <string>

#include "llama.h"

struct RecipeOptions {
  int64_t steps = 300, warmup = 20;
  double lr = 4e-3, ema = 0.98;
};

/// Muon for the matrices of the blocks and 8-bit AdamW for the other weights, rates by WSD, a guard, and an
/// exponential average of the weights; and their state in one file, which examples/python/small_llama.py
/// reads and writes as well.
class Recipe {
 public:
  Recipe(SmallLlama model, const RecipeOptions& options);
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;

  /// Clips the gradients, and steps the optimizers, or not if the guard finds the step bad.
  void step(shoestring::callbacks::Run& run);
  void save(const std::string& path, int64_t step, const std::map<std::string, std::string>& facts);
  /// Restores a run, and returns the number of its steps.
  int64_t load(const std::string& path, const std::map<std::string, std::string>& facts);

  shoestring::optim::Averages averages;
  shoestring::optim::Muon muon;
  shoestring::optim::AdamW adamw;
  shoestring::optim::Guard guard;

 private:
  shoestring::TrainingRun training_run();

  SmallLlama model_;
  shoestring::optim::Scheduler muon_rate_, adamw_rate_;
  shoestring::callbacks::Callbacks callbacks_;
};
