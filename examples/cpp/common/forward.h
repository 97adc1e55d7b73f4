#pragma once

#include <shoestring/checkpoint/checkpoint_sequence.h>
#include <shoestring/checkpoint/offload_activations.h>
#include <shoestring/checkpoint/offload_weights.h>

#include <memory>
#include <optional>
#include <vector>

#include "data.h"
#include "model.h"
#include "options.h"
#include "processes.h"

/// Computes losses of a model, in the precision of --precision. During training, the activations of each
/// layer are kept, recomputed or offloaded, as --activations, --memory-budget and --plan say.
class Forward {
 public:
  /// weights: where the model's frozen weights are while no layer needs them, or null if they are here.
  Forward(const LlamaForCausalLM& model, const LoopOptions& options, at::Device device,
          const Processes& processes, shoestring::OffloadWeights* weights = nullptr);

  /// Prepares training. Call it when the parameters are final. With --memory-budget, plans for each layer
  /// whether its activations are kept, recomputed or offloaded, and prints the plan. With --plan, takes the
  /// layers' plan from the file. rows: tokens of a micro-batch.
  void begin_training(const at::Tensor& rows);
  /// Returns the mean loss over all positions of `rows`, which are tokens (rows, tokens + 1) int64 on any
  /// device, as a scalar on the model's device. During training, the losses of routers are added to it.
  at::Tensor loss(const at::Tensor& rows);
  /// Returns logits (rows, tokens, vocabulary) for tokens (rows, tokens).
  at::Tensor logits(const at::Tensor& tokens);
  /// Returns the mean loss over the first blocks, at most --eval-batches micro-batches. Processes share them.
  double validate(const Blocks& blocks);

  at::Device device() const { return device_; }

 private:
  std::vector<shoestring::BlockFunction> layers(int64_t tokens);
  std::vector<shoestring::BlockFunction> functions(const at::Tensor& rows);
  at::Tensor run_layers(const std::vector<shoestring::BlockFunction>& functions, at::Tensor x);

  LlamaForCausalLM model_;
  const LoopOptions& options_;
  at::Device device_;
  const Processes& processes_;
  shoestring::OffloadWeights* weights_;
  std::unique_ptr<shoestring::OffloadActivations> offload_;
  std::optional<shoestring::SequencePlan> plan_;
};
