#pragma once

// Schedules of the learning rate and of other options. A schedule is a pure function of the step, so a run
// that resumes needs only the number of its step.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>

namespace shoestring::optim {

// ---- Schedules

/// Options of the schedules in shoestring::optim::schedules. Steps count from 0. Options that a schedule does
/// not take must not be set.
struct SHOESTRING_API ScheduleOptions {
  ScheduleOptions() = default;
  ScheduleOptions(int64_t steps) : steps_(steps) {}
  /// Number of steps of the training, including those of the warm-up. Every schedule needs it, except
  /// constant and inverse_sqrt, which do not take it. Later steps have the value of the end.
  TORCH_ARG(std::optional<int64_t>, steps);
  /// Number of steps in which the value rises linearly to the peak, which step `warmup` has. one_cycle takes
  /// `rise` instead.
  TORCH_ARG(std::optional<int64_t>, warmup);
  /// Value of step 0, as a fraction of the peak. std::nullopt stands for 1 / (warmup + 1).
  TORCH_ARG(std::optional<double>, warmup_start);
  /// Highest value. Without it, the schedule gives factors, by which Scheduler multiplies the value that an
  /// option had at first.
  TORCH_ARG(std::optional<double>, peak);
  /// Value at the end, as a fraction of the peak. 0 if it is not set, and 1 / 250,000 for one_cycle. linear,
  /// cosine, one_cycle, flat_cos, wsd and polynomial take it.
  TORCH_ARG(std::optional<double>, end);
  /// one_cycle: value of step 0, as a fraction of the peak; 1 / 25 if it is not set.
  TORCH_ARG(std::optional<double>, start);
  /// one_cycle: share of the steps in which the value rises; 0.3 if it is not set.
  TORCH_ARG(std::optional<double>, rise);
  /// flat_cos: share of the steps after warm-up with the peak's value; 0.72 if it is not set.
  TORCH_ARG(std::optional<double>, flat);
  /// wsd: share of the steps after warm-up in which the value decays; 0.2 if it is not set.
  TORCH_ARG(std::optional<double>, decay);
  /// Shape of a rise or a decay: "linear", "cosine" or "sqrt" of wsd ("linear" if it is not set), "cosine" or
  /// "linear" of one_cycle ("cosine" if it is not set).
  TORCH_ARG(std::optional<std::string>, shape);
  /// polynomial: the power; 1 if it is not set.
  TORCH_ARG(std::optional<double>, power);
  /// cosine: number of equal cycles, each of which falls from the peak to the end; 1 if it is not set.
  TORCH_ARG(std::optional<int64_t>, cycles);
  /// inverse_sqrt: number of steps after which the value has fallen to 1 / sqrt(2) of the peak. If it is not
  /// set, that is `warmup`, or 10,000 without warm-up.
  TORCH_ARG(std::optional<int64_t>, timescale);
};

/// A value as a function of the step: one of shoestring::optim::schedules, or a function of the user's.
class SHOESTRING_API Schedule {
 public:
  /// Makes a schedule from a function of the step. Its values are factors unless `absolute` is set.
  Schedule(std::function<double(int64_t)> value, bool absolute = false);

  /// Returns the value of a step. Raises c10::Error if the step is negative.
  double operator()(int64_t step) const;
  /// Returns the value of a step as a whole number, for a batch size or a sequence length: the largest
  /// multiple of `multiple_of` that is not above the value, and at least `multiple_of`.
  int64_t whole(int64_t step, int64_t multiple_of = 1) const;
  /// Returns whether the values are those of the option itself, and not factors of its first value.
  bool is_absolute() const { return absolute_; }

 private:
  std::function<double(int64_t)> value_;
  bool absolute_;
};

/// With the warm-up of w steps, and the share x = (step - w) / (steps - w) of the steps after it:
namespace schedules {
/// peak
SHOESTRING_API Schedule constant(const ScheduleOptions& options = {});
/// peak (1 - x (1 - end))
SHOESTRING_API Schedule linear(const ScheduleOptions& options);
/// peak (end + (1 - end) (1 + cos(pi x)) / 2), Loshchilov & Hutter, arXiv 1608.03983
SHOESTRING_API Schedule cosine(const ScheduleOptions& options);
/// From `start` up to the peak, and down to `end`, which the last step has. Smith & Topin, arXiv 1708.07120.
SHOESTRING_API Schedule one_cycle(const ScheduleOptions& options);
/// The peak for a share `flat` of the steps, then as cosine.
SHOESTRING_API Schedule flat_cos(const ScheduleOptions& options);
/// Warm-up, stable, decay: the peak, then a decay in the last share `decay` of the steps. Hu et al., arXiv
/// 2404.06395.
SHOESTRING_API Schedule wsd(const ScheduleOptions& options);
/// peak sqrt(timescale / (timescale + step - w))
SHOESTRING_API Schedule inverse_sqrt(const ScheduleOptions& options = {});
/// peak (end + (1 - end) (1 - x)^power)
SHOESTRING_API Schedule polynomial(const ScheduleOptions& options);
/// Returns the schedule with this name.
SHOESTRING_API Schedule by_name(const std::string& name, const ScheduleOptions& options);
}  // namespace schedules

// ---- Applying schedules

/// Sets options of an optimizer's groups from schedules: lr, weight_decay, beta1, beta2, momentum, and any
/// other number among the options.
///
///     Scheduler scheduler(optimizer, {{"lr", schedules::cosine(ScheduleOptions(1000).warmup(100))}});
///     for (...) { ...; optimizer.step(); scheduler.step(); }
///
/// The constructor sets the values of step 0. Groups without a schedule of their own share one. The
/// optimizers are ours, and LibTorch's Adam, AdamW, SGD, RMSprop and Adagrad.
class SHOESTRING_API Scheduler {
 public:
  /// Schedules of an option: one for all groups, or one per group.
  struct SHOESTRING_API PerGroup : std::vector<Schedule> {
    PerGroup(Schedule schedule) : std::vector<Schedule>{std::move(schedule)} {}
    PerGroup(std::vector<Schedule> schedules) : std::vector<Schedule>(std::move(schedules)) {}
  };

  /// `optimizer` must live as long as the scheduler. Raises c10::Error if an option does not exist.
  Scheduler(torch::optim::Optimizer& optimizer, std::map<std::string, PerGroup> schedules);

  /// Sets the values of the next step.
  void step() { step(step_ + 1); }
  /// Sets the values of step `step`. Raises c10::Error before anything has changed.
  void step(int64_t step);
  /// Returns the step whose values are set.
  int64_t current_step() const { return step_; }

  /// Returns the step, as the int64 scalar "step", and the first value of each option that is scheduled by
  /// factors.
  TensorDict state() const;
  /// Restores what state() has returned. The options themselves are part of the optimizer's state; the next
  /// step() sets them.
  void load_state(const TensorDict& state);

 private:
  double* place(const std::string& option, size_t group) const;

  torch::optim::Optimizer* optimizer_;
  std::map<std::string, PerGroup> schedules_;
  std::map<std::string, std::vector<double>> first_;
  int64_t step_ = 0;
};

// ---- Reducing on a plateau

struct SHOESTRING_API ReduceOnPlateauOptions {
  /// "min" if a smaller metric is better, "max" if a larger one is.
  TORCH_ARG(std::string, mode) = "min";
  /// The factor by which learning rates are multiplied.
  TORCH_ARG(double, factor) = 0.1;
  /// Number of metrics in a row without an improvement that are tolerated.
  TORCH_ARG(int64_t, patience) = 10;
  /// The least improvement that counts.
  TORCH_ARG(double, threshold) = 1e-4;
  /// "rel": the threshold is a fraction of the best metric; "abs": a difference from it.
  TORCH_ARG(std::string, threshold_mode) = "rel";
  /// Number of metrics after a reduction that are not counted.
  TORCH_ARG(int64_t, cooldown) = 0;
  /// The lowest learning rate of each group: one number for all, or one per group.
  TORCH_ARG(std::vector<double>, min_lr) = { 0 };
  /// Reductions by no more than this are left out.
  TORCH_ARG(double, eps) = 1e-8;
};

/// Reduces the learning rates when a metric has stopped improving, as
/// torch.optim.lr_scheduler.ReduceLROnPlateau in Python does.
class SHOESTRING_API ReduceOnPlateau {
 public:
  /// `optimizer` must live as long as this object.
  ReduceOnPlateau(torch::optim::Optimizer& optimizer, ReduceOnPlateauOptions options = {});

  /// Counts a metric, such as a validation loss. Returns whether the learning rates have been reduced. Raises
  /// c10::Error if the metric is NaN; nothing has changed then.
  bool step(double metric);
  /// Returns the best metric so far.
  double best() const { return best_; }

  /// Returns the scalars "best", "num_bad_epochs" and "cooldown_counter". The optimizer's state has the
  /// rates.
  TensorDict state() const;
  void load_state(const TensorDict& state);

 private:
  bool improves(double metric) const;

  torch::optim::Optimizer* optimizer_;
  ReduceOnPlateauOptions options_;
  double best_;
  int64_t bad_ = 0, cooling_ = 0;
};

}  // namespace shoestring::optim
