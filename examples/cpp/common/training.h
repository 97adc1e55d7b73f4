#pragma once

#include <cstdint>

/// Returns the learning rate of a step: linear warm-up, then a cosine down to 0 (Loshchilov & Hutter 2017).
/// It depends on the step alone.
double learning_rate(int64_t step, int64_t steps, int64_t warmup, double highest);

/// Returns the peak memory of the process (VmHWM), in bytes.
int64_t peak_memory();

/// Prints the progress of training: on a terminal one line that each step rewrites, elsewhere about twenty
/// lines per run.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step);
  /// step: number of completed steps.
  void show(int64_t step, double loss, double seconds);
  double tokens_per_second() const;

 private:
  int64_t steps_, tokens_, shown_ = 0;
  bool terminal_;
  double timed_ = 0;
};
