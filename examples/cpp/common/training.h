#pragma once

#include <cstdint>

/// Linear warm-up, then a cosine down to 0 (Loshchilov & Hutter 2017): a pure function of the step.
double learning_rate(int64_t step, int64_t steps, int64_t warmup, double highest);

/// High-water mark of the process's memory, in bytes.
int64_t peak_memory();

/// A line for each step that is rewritten on a terminal; elsewhere about twenty lines a run.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step);
  /// step: the number of those that are done.
  void show(int64_t step, double loss, double seconds);
  double tokens_per_second() const;

 private:
  int64_t steps_, tokens_, shown_ = 0;
  bool terminal_;
  double timed_ = 0;
};
