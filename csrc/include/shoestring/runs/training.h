#pragma once

// Saves and restores a whole training run in one file: weights, optimizers, random state, the position in the
// data, schedules and everything else that has a state.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>

namespace shoestring {

/// An object whose state is part of a training run: a GradScaler, a Scheduler, or any other object with the
/// members `TensorDict state() const` and `void load_state(const TensorDict&)`. The object must outlive the
/// part.
struct SHOESTRING_API TrainingPart {
  template <class Object>
  TrainingPart(Object& object)
      : state([&object] { return object.state(); }),
        load_state([&object](const TensorDict& saved) { object.load_state(saved); }) {}

  std::function<TensorDict()> state;
  std::function<void(const TensorDict&)> load_state;
};

/// Returns the tensors of a module that a training run changes, by name: parameters that require gradients,
/// and all buffers. With `frozen`, also the other parameters. A tensor with two names appears once.
SHOESTRING_API TensorDict training_tensors(const torch::nn::Module& module, bool frozen = false);

/// A training run: references to the objects that save_training saves and load_training restores, and the
/// position.
///
///     TrainingRun run{training_tensors(*model), {&optimizer}, {{"schedule", scheduler}}};
///     run.step = 100;
///     save_training("run.safetensors", run);
struct SHOESTRING_API TrainingRun {
  TensorDict tensors{};
  /// Our optimizers that have an update rule of their own, and LibTorch's Adam, AdamW and SGD.
  std::vector<torch::optim::Optimizer*> optimizers{};
  /// No name may begin another one (`a` and `a.b`).
  std::map<std::string, TrainingPart> parts{};
  /// Number of steps that have been taken.
  int64_t step = 0;
  /// Numbers that say where in the data the run is.
  std::map<std::string, int64_t> position{};
  /// Texts that must be the same when the run is resumed, such as a digest of the data.
  std::map<std::string, std::string> facts{};
};

/// Saves a run to the safetensors file `path`, with the states of the generators of random numbers of the CPU
/// and of all GPUs. An existing file is replaced only after the new file is complete and on disk. Python
/// reads the file with shoestring.load_training. Raises c10::Error if an optimizer has no state that a file
/// can hold.
///
/// If processes have split parameters or the state of an optimizer (shoestring/distributed/distributed.h),
/// all of them must call it. The first one writes the file, which is that of one process. Of what FullyShard
/// has split, a process has one whole tensor at a time.
SHOESTRING_API void save_training(const std::string& path, const TrainingRun& run);

/// Restores a run from a file that save_training has written, in C++ or in Python, and sets run.step and
/// run.position. Training then continues bit for bit. The state of a parameter is found by the name that the
/// parameter has in `run.tensors`, so optimizers may have the parameters of a group in another order than
/// before. Raises c10::Error, and leaves everything as it was, if the file is damaged, or belongs to another
/// model, optimizer or set of facts, or if a part refuses its state. Each of several processes reads its
/// parts; their number may be another one than before.
SHOESTRING_API void load_training(const std::string& path, TrainingRun& run);

}  // namespace shoestring
