#pragma once

// Averages of the weights of a training run. shoestring/optim.h includes this header.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>

namespace shoestring::optim {

namespace detail {
class AveragesCore;
}

struct SHOESTRING_API AveragesOptions {
  AveragesOptions(std::string kind = "ema") : kind_(std::move(kind)) {}
  /// - "ema": exponential moving average, average = decay * average + (1 - decay) * weight.
  /// - "swa": mean of the weights of all updates (arXiv 1803.05407).
  /// - "lawa": mean of the weights of the last `last` updates (arXiv 2209.14981).
  TORCH_ARG(std::string, kind);
  /// Factor of the old average in "ema", in [0, 1). It is rounded to fp32.
  TORCH_ARG(double, decay) = 0.999;
  /// Number of calls of update() per update of the averages.
  TORCH_ARG(int64_t, every) = 1;
  /// Number of snapshots of the weights that "lawa" keeps.
  TORCH_ARG(int64_t, last) = 5;
  /// How averages of fp32, bf16 and fp16 weights are stored. The averages of fp64 weights are always fp64.
  /// - "fp32": 4 bytes per weight. Snapshots of "lawa" are exact copies in the dtype of the weight.
  /// - "bf16": 2 bytes per weight, with stochastic rounding. Rounded to nearest, an average with decay 0.999
  ///   would stand still. Snapshots of "lawa" are rounded to nearest.
  TORCH_ARG(std::string, format) = "fp32";
  /// "cpu" keeps the averages in host memory, with a copy of the weights in their own dtype. "" keeps them on
  /// the device of the weights.
  TORCH_ARG(std::string, offload) = "";
  /// Seed of the stochastic rounding.
  TORCH_ARG(int64_t, seed) = 0;
};

/// The weights of a model are averages as long as this object exists. Its destructor restores the training
/// weights, bit for bit.
class SHOESTRING_API SwappedWeights {
 public:
  SwappedWeights(SwappedWeights&& other) noexcept = default;
  SwappedWeights& operator=(SwappedWeights&&) = delete;
  SwappedWeights(const SwappedWeights&) = delete;
  SwappedWeights& operator=(const SwappedWeights&) = delete;
  /// Calls restore(). An error becomes a warning.
  ~SwappedWeights();

  /// Restores the training weights. A second call does nothing. Throws c10::Error if a weight has changed its
  /// dtype, device or shape; the training weights are then lost.
  void restore();

 private:
  friend class Averages;
  explicit SwappedWeights(std::shared_ptr<detail::AveragesCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::AveragesCore> core_;
};

/// Averages the weights of a model over the steps of training. The Python counterpart is
/// shoestring.optim.Averages. Example:
///
///     Averages averages(*model, AveragesOptions("ema").decay(0.999));
///     for (const auto& batch : batches) {
///       ...
///       optimizer.step();
///       averages.update();
///     }
///     {
///       const auto swapped = averages.swap();
///       evaluate(model);  // with the averages
///     }
///     averages.copy_to(*exported);
///
/// The averages cover parameters and floating-point buffers (fp64, fp32, bf16, fp16). All other buffers, such
/// as counters, are copied by each update. A parameter that is frozen when the object is constructed has no
/// average and takes no memory; if it requires a gradient later, update() throws. Tied weights are averaged
/// once.
///
/// The first update copies the weights, and an exponential average starts from there. Before it, the averages
/// are the weights. Averages are computed in fp32, and those of fp64 weights in fp64.
///
/// update() does not wait for a GPU. With offload("cpu") the weights are copied to pinned memory in the
/// current stream, and a thread averages them on the CPU. Then update() waits if the CPU has not finished the
/// update before.
///
/// Memory: see AveragesOptions::format; "lawa" takes it `last` times. It is allocated by the first updates.
class SHOESTRING_API Averages {
 public:
  /// Averages the parameters and buffers of a module. Throws c10::Error if an option is out of range, or if
  /// the format is "bf16" and a weight is on a device other than the CPU or CUDA, without offload("cpu").
  explicit Averages(const torch::nn::Module& module, const AveragesOptions& options = {});
  /// Averages tensors by name.
  explicit Averages(const TensorDict& parameters, const AveragesOptions& options = {},
                    const TensorDict& buffers = TensorDict());
  Averages(Averages&&) noexcept = default;
  Averages& operator=(Averages&&) noexcept = default;
  Averages(const Averages&) = delete;
  Averages& operator=(const Averages&) = delete;

  /// Counts a step, and updates the averages in every `every`-th call. Call it after each step of the
  /// optimizer. Throws c10::Error, and changes nothing, if a weight has changed its dtype, device or shape,
  /// or while a result of swap() exists.
  void update();

  /// Puts the averages into the model until the result is destroyed. It takes the memory of a copy of the
  /// weights; with offload("cpu") in host memory.
  [[nodiscard]] SwappedWeights swap();

  /// Copies the averages to the parameters and buffers of another module, or of the same, by name. Throws
  /// c10::Error, and changes nothing, if a name is missing or a shape differs. Parameters without an average
  /// do not change.
  void copy_to(torch::nn::Module& module) const;

  /// Returns the number of updates of the averages so far.
  int64_t updates() const;

  /// Returns the state under the names of Python's state_dict(): "kind", "steps" and "updates" as int64
  /// numbers, "average.<name>" or "snapshot.<index>.<name>" (the oldest has index 0), and "copy.<name>" for
  /// buffers that are not averaged. The tensors share the memory of the averages. save_safetensors writes the
  /// result to a file.
  TensorDict state() const;
  /// Restores a state of state(). The weights must have the same names, shapes and storage dtypes, and the
  /// kind must be the same; other options may differ. "lawa" keeps the newest `last` snapshots. If the state
  /// does not fit, throws c10::Error and changes nothing.
  void load_state(const TensorDict& state);

 private:
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<detail::AveragesCore> core_;
};

}  // namespace shoestring::optim
