#pragma once

#include <functional>
#include <string>
#include <vector>

#include "data.h"
#include "forward.h"
#include "optimizers.h"
#include "options.h"
#include "readings.h"

/// Prints the progress of training. On a terminal, each reading rewrites one line. Elsewhere, about twenty
/// lines are printed per run.
class Progress {
 public:
  Progress(const LoopOptions& options, at::Device device);
  void show(const Reading& reading);
  double tokens_per_second() const;

 private:
  int64_t steps_, tokens_, shown_ = 0;
  bool terminal_;
  double timed_ = 0;
  at::Device device_;
};

/// The training loop. The host waits for the device only to read losses and norms, every --log-every steps
/// and one interval late, before a step that is due for `after`, and in each step with --plain or
/// --step-in-backward.
struct Trainer {
  const LoopOptions& options;
  Forward& forward;
  Optimizers& optimizers;
  const Blocks& blocks;
  std::vector<at::Tensor> trained;
  bool keep_gradients = false;  // set gradients to zero after a step instead of freeing them
  // Called for each step, after its reading has been printed.
  std::function<void(const Reading&)> on_reading = [](const Reading&) {};
  // Returns the end of an error message, on what remains of a run that has failed.
  std::function<std::string()> remains = [] { return std::string(); };

  /// Trains from step `start` (counted from 0) to the last step. Calls after(step) after each step for which
  /// due(step) is true; both count completed steps. The last step must be due. Returns the speed in tokens
  /// per second. Raises InputError if a loss or a gradient norm is not finite. The weights are then those
  /// before the step; with --step-in-backward, a norm is known only after the weights have changed.
  double fit(int64_t start, const std::function<bool(int64_t)>& due,
             const std::function<void(int64_t)>& after);

 private:
  void run_step(int64_t step, BatchOrder& order, Readings& readings);
  void require_finite(const char* what, double value, int64_t step, const char* when = "before") const;
};
