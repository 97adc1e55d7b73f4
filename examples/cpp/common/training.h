#pragma once

#include <cstdint>

/// Returns the learning rate of a training step: linear warm-up, then a cosine down to 0 (Loshchilov & Hutter
/// 2017). The learning rate depends only on the number of the step.
double learning_rate(int64_t step, int64_t steps, int64_t warmup, double highest);

/// Returns the peak memory of the process (VmHWM), in bytes.
int64_t peak_memory();

/// Prints the progress of training. On a terminal, each step rewrites one line. Elsewhere, about twenty lines
/// are printed per run.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step);
  /// step: number of completed training steps. seconds: time of the last step.
  void show(int64_t step, double loss, double seconds);
  double tokens_per_second() const;

 private:
  int64_t steps_, tokens_, shown_ = 0;
  bool terminal_;
  double timed_ = 0;
};
