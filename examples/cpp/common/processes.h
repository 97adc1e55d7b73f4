#pragma once

// The processes of a training run, which torchrun has started.

#include <ATen/core/Tensor.h>
#include <shoestring/checkpoint/checkpoint_sequence.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "options.h"

/// The processes that train one model, by the strategy of --parallel. Each of them reads its rows of every
/// micro-batch. All processes must call the functions that communicate, in the same order.
class Processes {
 public:
  /// This process trains alone. Raises InputError if torchrun has started several.
  Processes();
  /// Connects to the other processes that torchrun has started, if there are any. The first process talks to
  /// the terminal: the others have no standard output from then on. Raises InputError if there are several
  /// processes and no strategy, if they cannot share a micro-batch, or if they do not connect.
  Processes(const LoopOptions& options, at::Device device);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  int64_t count() const;
  /// Returns whether this process writes the files.
  bool is_first() const;
  /// Returns the elements of a list that are this process's: as many as the others have, or one less.
  std::vector<int64_t> share(const std::vector<int64_t>& all) const;
  /// Returns the mean of a number over the processes.
  at::Tensor mean(const at::Tensor& number) const;
  /// Returns a number of each process.
  std::vector<int64_t> of_all(int64_t number) const;

  /// Returns whether a process has only its part of the gradients (zero2), or of the weights (zero3).
  bool splits_gradients() const;
  bool splits_weights() const;

  /// Adds the next block of the model, with its initial values. With zero3, each process keeps its part.
  /// keep: whether the block runs several times in a forward.
  void add_block(const std::vector<at::Tensor>& parameters, bool keep);
  /// Returns forward(x), with whole parameters of a block.
  at::Tensor run(int64_t block, const at::Tensor& x, const shoestring::BlockFunction& forward) const;
  /// Returns what the optimizer of this process steps: the parameter, or with zero3 its part.
  at::Tensor part(const at::Tensor& parameter) const;
  /// Gives all processes the weights of the first, and shares the gradients and the steps. Call it before the
  /// first step.
  void begin(const torch::nn::Module& model, const std::vector<torch::optim::Optimizer*>& optimizers);
  /// Runs backward. is_last: whether the micro-batch is the last one of a step. The gradients then are means
  /// over the processes.
  void backward(const at::Tensor& loss, bool is_last) const;
  /// Clips the gradients with zero3. Returns the norm before.
  at::Tensor clip_grad_norm(double limit) const;

  /// Calls a function that saves the weights and the state of optimizers, on each process that has a part of
  /// them.
  void save(const std::function<void()>& function) const;
  /// Calls a function on the first process, while it has whole weights.
  void present(const std::function<void()>& function) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null if this process trains alone
};
