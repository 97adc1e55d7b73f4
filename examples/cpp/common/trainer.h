#pragma once

#include <shoestring/data/data.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data.h"
#include "forward.h"
#include "optimizers.h"
#include "options.h"
#include "processes.h"
#include "readings.h"

/// The speed of the training steps of this process.
struct Speed {
  double tokens_per_second = 0;
  double data_seconds = 0;  // the time in which training waited for data

  std::string text() const;
};

/// Prints the progress of training. On a terminal, each reading rewrites one line. Elsewhere, about twenty
/// lines are printed per run, and one for each validation.
class Progress {
 public:
  Progress(const LoopOptions& options, at::Device device);
  /// validation: the loss on the held-out data after this step, if it was computed.
  void show(const Reading& reading, std::optional<double> validation);
  Speed speed() const;

 private:
  int64_t steps_, tokens_, shown_ = 0;
  bool terminal_;
  double timed_ = 0, data_seconds_ = 0;
  std::optional<double> validation_;  // the last validation loss
  at::Device device_;
};

/// The training loop. A Prefetcher reads the micro-batches ahead. The host waits for the device only to read
/// losses and norms, every --log-every steps and one interval late, before a validation or a step that is due
/// for `after`, and in each step with --baseline or --step-in-backward.
struct Trainer {
  const LoopOptions& options;
  Forward& forward;
  Optimizers& optimizers;
  const Processes& processes;
  const Split& data;
  std::vector<at::Tensor> trained;
  bool keep_gradients = false;  // set gradients to zero after a step instead of freeing them
  // Called for each step, after its reading has been printed.
  std::function<void(const Reading&)> on_reading = [](const Reading&) {};
  // Returns the end of an error message, on what remains of a run that has failed.
  std::function<std::string()> remains = [] { return std::string(); };

  /// Trains from step `start` (counted from 0) to the last step. Validates every --eval-every steps, except
  /// after the last step. Calls after(step) after each step for which due(step) is true; both count completed
  /// steps. The last step must be due. Raises InputError if the data cannot be read, or if a loss or a
  /// gradient norm is not finite. In the latter case, the weights are those before the step; with
  /// --step-in-backward, a norm is known only after the weights have changed.
  Speed fit(int64_t start, const std::function<bool(int64_t)>& due,
            const std::function<void(int64_t)>& after);
  /// Sets the parameters to the point of evaluation. Returns the mean loss on the held-out data, or nullopt
  /// if no data is held out. Raises InputError if the loss is not finite.
  std::optional<double> validate();

 private:
  bool is_validated(int64_t step) const;
  void run_step(int64_t step, shoestring::data::Prefetcher& batches, Readings& readings);
  void require_finite(const char* what, double value, int64_t step, const char* when = "before") const;
};
