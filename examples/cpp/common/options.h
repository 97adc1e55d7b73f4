#pragma once

#include <shoestring/planning/plan_training.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "command_line.h"

/// The options that the training programs share. They have the names, values and defaults of the commands
/// `shoestring train` and `shoestring finetune`.
struct LoopOptions {
  std::string data, out, device = "auto", plan;
  std::string precision = "fp32", weights = "fp32", optimizer = "adamw", optimizer_state = "8bit";
  std::string offload = "none", activations = "keep", memory_budget, schedule = "cosine";
  bool step_in_backward = false, host_allocator = false;
  int64_t steps = 200, batch_size = 8, seq_len = 512, accumulate = 1;
  double lr = 1e-3;
  int64_t warmup = 10;
  double weight_decay = 0.1, clip = 1.0;
  int64_t seed = 0, log_every = 0, threads = 0, workspace_mb = 64;
  double val_fraction = 0.02;
  int64_t eval_every = 50, eval_batches = 8;

  // These are no options of their own. `baseline`, `parallel` and `compress` are options of train_gpt only.
  std::tuple<double, double> betas{0.9, 0.95};  // of AdamW
  bool baseline = false;
  std::string parallel = "none", compress = "none";
  std::optional<shoestring::TrainingPlan> training_plan;  // of --plan, whose choices the options have

  /// Returns the memory budget in bytes, 0 if there is none.
  int64_t budget_bytes() const;
  /// Returns whether the loss is scaled, so that small gradients do not become zero in fp16.
  bool scales_loss() const { return precision == "fp16"; }
};

/// Returns the number of bytes that a text such as "6GiB" or "500 MB" means, or 0 if it is no such text.
int64_t bytes_of(const std::string& text);

/// Returns whether a value of --offload or --offload-weights is nvme:DIR with a folder.
bool is_on_disk(const std::string& place);

/// Adds the shared options. least_steps: smallest value of --steps.
void add_loop_options(CommandLine& line, LoopOptions& options, int64_t least_steps);

/// Raises InputError if values of the shared options cannot be used, or if options cannot be combined. Writes
/// nothing.
void check_loop_options(const LoopOptions& options);

/// Raises InputError if two options are both given that cannot be combined.
void refuse_together(const std::string& option, bool given, const std::string& other, bool other_given);
