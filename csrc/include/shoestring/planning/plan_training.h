#pragma once

// Plans a whole training step: the micro-batch, the precision, what each block does with its activations, the
// form and the place of optimizer state and weights, so that a step takes the least time within budgets of
// device memory, host memory and disk.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <shoestring/checkpoint/checkpoint_plan.h>
#include <shoestring/core/export.h>

namespace shoestring {

/// Forward and backward of one micro-batch, as they were measured or predicted.
struct MeasuredPass {
  int64_t rows = 0;
  /// One entry for each kind of block. The backward of `freed` frees each gradient as soon as it has been
  /// added up; the backward of `kept` leaves the gradients, which are its gradient_bytes. The choices of both
  /// are the same.
  std::vector<PlanBlock> freed;
  std::vector<PlanBlock> kept;
};

/// One way to store and to run an optimizer. All bytes are those of all trained weights together.
struct OptimizerWay {
  std::string state = "8bit";  ///< format of the moments
  bool step_in_backward = false;
  std::string offload = "none";  ///< place of the state: "none", "cpu", "stream" or "nvme:DIR"
  std::string freedom = "exact";
  /// device_bytes, host_bytes and disk_bytes: what the optimizer holds from step to step
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;
  int64_t step_bytes = 0;      ///< device memory that a step needs besides device_bytes
  int64_t gradient_bytes = 0;  ///< with step_in_backward, gradients on the device at a time
  int64_t sum_bytes = 0;  ///< with step_in_backward, sums of gradients if there are several micro-batches
  double seconds = 0;     ///< time of a step after backward
  double backward_seconds = 0;  ///< time that the optimizer adds to backward, once for each batch
  double sum_seconds = 0;  ///< time in which each micro-batch after the first adds its gradients to the sums
};

/// A place for the weights of a model.
struct WeightsPlace {
  std::string place = "none";  ///< "none", "cpu" or "nvme:DIR"
  int64_t keep = 0;            ///< bytes of weights of the first blocks that stay on the device
  /// device_bytes, host_bytes and disk_bytes: where the weights are during a step
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;
  double seconds = 0;  ///< time of the copies of one micro-batch, which run beside the computation
  /// The layers whose weights leave in tiles, by name, with the most rows of a tile (tile_rows)
  std::map<std::string, int64_t> tiles;
};

/// A form of training says what is trained in which precision. Everything that follows was measured, or is
/// predicted, for this form.
struct TrainingForm {
  std::string precision = "fp32";  ///< of matrix products
  std::string weights = "fp32";    ///< how trained weights are stored and rounded
  std::string adapters = "none";   ///< "none" trains all weights that require gradients; "lora"
  std::string quantize = "none";   ///< format of frozen weights
  std::string freedom = "exact";   ///< the least freedom that allows this form: exact, rounding or method
  int64_t gradient_bytes = 0;      ///< gradients of all trained weights
  int64_t load_bytes = 0;          ///< memory that loading the model needs besides its weights
  int64_t saving_bytes = 0;        ///< memory that saving a checkpoint needs besides the weights and state
  /// The kind of each block, an index of MeasuredPass::freed. The first block is what runs before the blocks
  /// of the model, and the last block is what runs after them, with the loss.
  std::vector<int64_t> kinds;
  /// Passes of different numbers of rows, ascending. Passes of other micro-batches are computed from the two
  /// nearest, since bytes and seconds are affine in the rows.
  std::vector<MeasuredPass> passes;
  std::vector<OptimizerWay> optimizers;
  std::vector<WeightsPlace> places;
};

/// A situation says what is to be trained, and what there is to train it. It is measured in Python, or filled
/// in by a program.
struct SHOESTRING_API Situation {
  std::string model;                ///< a digest of the model
  std::string machine;              ///< a name of the hardware
  std::vector<std::string> blocks;  ///< names of the model's blocks
  /// Memory of the fused loss in MiB, for each choice of the last block.
  std::vector<int64_t> workspaces;
  int64_t batch_size = 1;
  /// Budgets in bytes; none if there is no limit. On a CPU, device_memory limits the whole process.
  std::optional<int64_t> device_memory;
  std::optional<int64_t> host_memory;
  std::optional<int64_t> disk;
  bool host_is_device = true;  ///< whether device and host are one memory, as on a CPU
  int64_t reserve_bytes = 0;   ///< device memory in use beside the training: the process and its libraries
  /// Bandwidths of the copies of activations to the host, in bytes per second, and the speed that they cost.
  /// With bandwidths of 0, or if host_is_device, no block copies activations.
  double out_bytes_per_second = 0;
  double in_bytes_per_second = 0;
  double copy_share = 0;
  int64_t prefetch = 1;
  std::vector<TrainingForm> forms;

  /// Returns the situation as JSON, which from_json() and Python read.
  std::string to_json() const;
  /// Reads JSON. Throws c10::ValueError, which names the field, if a field is missing, unknown or wrong.
  static Situation from_json(const std::string& text);
};

struct PlanOptions {
  using Fixed = std::map<std::string, std::string>;
  /// The freedom says what the plan may change: "exact" changes nothing but the order of sums, "rounding"
  /// allows forms that round, such as products in bf16, and "method" allows another method of training, such
  /// as adapters.
  TORCH_ARG(std::string, freedom) = "exact";
  /// Choices that are given, by the names of TrainingPlan::levers(). The rest is planned around them.
  TORCH_ARG(Fixed, fixed);
};

/// A block plan says what a block does with its activations.
struct BlockPlan {
  std::string block;
  std::string treatment;
  /// Bytes of blocks so far that may still wait for their copy to the host when the computation after this
  /// block begins.
  int64_t pending_bytes = 0;
  int64_t link_bytes = 0;  ///< bytes that the block copies to the host
};

/// Device memory at the peak of one phase of training.
struct PlanPhase {
  std::string name;
  int64_t bytes = 0;
};

/// Why a choice was made, in one line: what it costs or gains.
struct PlanReason {
  std::string lever;  ///< a name of TrainingPlan::levers(), or "" for the plan as a whole
  std::string text;
};

/// Another plan: its freedom and budget, and how it differs.
struct PlanAlternative {
  std::string freedom;
  std::map<std::string, std::string> levers;
  int64_t peak_bytes = 0;
  double seconds = 0;
};

/// A fastest plan for some budget of device memory.
struct PlanPoint {
  int64_t peak_bytes = 0;
  double seconds = 0;
  int64_t micro_batch = 0;
  int64_t recomputed = 0;  ///< blocks that do not keep all activations
};

struct SHOESTRING_API TrainingPlan {
  std::string model, machine, freedom;
  int64_t micro_batch = 1;
  int64_t accumulate = 1;
  std::string precision, weights, adapters, quantize;
  std::string optimizer_state;
  bool step_in_backward = false;
  std::string offload;
  std::string weights_place;
  int64_t keep = 0;
  std::map<std::string, int64_t> tiles;  ///< as in WeightsPlace
  std::string parallel =
      "none";                ///< how several processes share the training: "ddp", "zero1", "zero2", "zero3"
  int64_t workspace_mb = 0;  ///< 0 if the loss is not fused
  std::vector<BlockPlan> checkpoints;
  std::vector<PlanPhase> phases;
  /// The largest of the phases, and what the other budgets limit.
  int64_t peak_bytes = 0;
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;
  double seconds = 0;        ///< predicted time of a batch with its optimizer step
  double least_seconds = 0;  ///< no plan takes less; equal to `seconds` if the plan is proven optimal
  std::vector<PlanReason> reasons;
  std::vector<PlanAlternative> alternatives;
  std::vector<PlanPoint> frontier;

  /// Returns the choices by the names of the command line's options, such as "micro_batch" and
  /// "optimizer_state". "tiles" is "none", or NAME=ROWS of each layer in tiles, separated by commas.
  std::map<std::string, std::string> levers() const;

  std::string to_json() const;
  /// Reads JSON. Throws c10::ValueError, which names the field, if a field is missing, unknown or wrong.
  static TrainingPlan from_json(const std::string& text);
  /// Writes the plan as JSON, which Python reads. An existing file is replaced once the new one is complete.
  void save(const std::string& path) const;
  static TrainingPlan load(const std::string& path);
};

/// Returns the fastest plan for a situation whose memory is within all budgets. The search is exhaustive over
/// forms, micro-batches that divide the batch, ways of the optimizer and places of weights, and for each of
/// them exact over the treatments of blocks (checkpoint_frontier). More memory never gives a slower plan.
/// Plans that copy activations to the host are a selection, and least_seconds bounds how far the plan is from
/// the best. If host_memory is limited, the first blocks may copy, as many as have room for all their copies.
///
/// Throws c10::ValueError if the situation is wrong, if a fixed choice does not exist, or if no plan fits;
/// the message then says for each budget the least with which a plan exists.
SHOESTRING_API TrainingPlan plan_training(const Situation& situation, const PlanOptions& options = {});

}  // namespace shoestring
