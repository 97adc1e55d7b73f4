#pragma once

#include <shoestring/adapters/lora.h>
#include <shoestring/optim/grad_scaler.h>
#include <shoestring/optim/schedules.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "options.h"
#include "processes.h"

/// The optimizers of a run, which together step all trained parameters. --optimizer muon needs two: Muon for
/// the matrices of hidden layers, AdamW for the other parameters. With --baseline, the optimizer is
/// LibTorch's AdamW.
class Optimizers {
 public:
  /// groups: the trained parameters, with the highest learning rate of each group.
  /// ends: weights of embeddings and of the output layer, which Muon does not step.
  Optimizers(const std::vector<shoestring::lora::ParameterGroup>& groups, const std::vector<at::Tensor>& ends,
             const LoopOptions& options, const Processes& processes);

  /// Sets the learning rates for a step, counted from 0.
  void begin_step(int64_t step);
  /// Installs the gradient hooks of --step-in-backward. Later backward passes step the parameters.
  void step_in_backward();
  /// Sums gradients while the returned object lives, if backward steps the parameters.
  std::shared_ptr<void> accumulate();
  /// Runs backward of a micro-batch's loss, which --precision fp16 scales. `found_inf` is the argument of
  /// step(): if it is not zero, the gradients of a scaled loss are not finite. is_last: whether the
  /// micro-batch is the last one of a step.
  void backward(const at::Tensor& loss, const at::Tensor& found_inf, bool is_last);
  /// Divides the gradients by the scale of the loss. Call it before clipping.
  void unscale();
  /// Steps. `found_inf` is one fp32 element on the device: if it is not zero, the step changes nothing. With
  /// --precision fp16, a step whose gradients are not finite changes only the scale. The host reads nothing
  /// from the device, except with LibTorch's AdamW.
  void step(const at::Tensor& found_inf);
  /// Returns whether only the optimizer sees all gradients, so that it also clips: with --step-in-backward
  /// and with --parallel zero2.
  bool clips() const;
  /// Returns the gradient norm of the last step if the optimizer clips; undefined otherwise.
  at::Tensor norm_of_step() const;
  void zero_grad(bool set_to_none);
  /// Sets the parameters to the point of training or of evaluation. Only --optimizer schedule-free-adamw
  /// distinguishes them.
  void set_training(bool training);

  /// Returns the optimizers, whose state is part of the run.
  std::vector<torch::optim::Optimizer*> all() const;
  /// Returns the scaler of the loss, which is disabled unless --precision is fp16.
  shoestring::optim::GradScaler& scaler() { return scaler_; }

 private:
  const LoopOptions& options_;
  const Processes& processes_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> all_;
  shoestring::optim::Schedule schedule_;
  shoestring::optim::GradScaler scaler_;
  std::vector<double> highest_;  // highest learning rate of each group
};
