#pragma once

// Callbacks: what happens after each step of a training loop, with state that is saved with the run.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/runs/training.h>

namespace shoestring::callbacks {

/// The part of a training loop that a callback sees.
struct SHOESTRING_API Run {
  /// The model that is trained, or null, and its optimizers.
  torch::nn::Module* model = nullptr;
  std::vector<torch::optim::Optimizer*> optimizers{};
  /// Number of steps that have been taken.
  int64_t step = 0;
  /// The loss of the last step, on its device, or undefined.
  at::Tensor loss{};
  /// Numbers that the loop has measured, by name.
  std::map<std::string, double> metrics{};
  /// A callback sets this to end the loop.
  bool should_stop = false;
};

/// The base class of callbacks. A derived class overrides the functions that it needs. The Python counterpart
/// is shoestring.callbacks.Callback.
class SHOESTRING_API Callback {
 public:
  virtual ~Callback();
  /// The loop calls this before the first step of a run, or of a resumed run.
  virtual void on_start(Run& run);
  /// The loop calls this after each step of the optimizers.
  virtual void on_step(Run& run);
  /// The loop calls this when it has put numbers into run.metrics.
  virtual void on_metrics(Run& run);
  /// The loop calls this after the last step.
  virtual void on_end(Run& run);
  /// Returns the state that is saved with the run.
  virtual TensorDict state() const;
  /// Restores what state() has returned. Throws c10::Error, and changes nothing, if it does not fit.
  virtual void load_state(const TensorDict& state);
};

/// Calls a function after each step, or after every `every`-th step. With an object that has the members
/// state() and load_state(), such as a Scheduler or Averages, saves the state of the object. The object must
/// outlive the callback.
///
///     OnStep([&] { averages.update(); }, averages)
class SHOESTRING_API OnStep : public Callback {
 public:
  /// Throws c10::Error if `every` is below 1.
  explicit OnStep(std::function<void()> call, int64_t every = 1);
  template <class Object>
  OnStep(std::function<void()> call, Object& object, int64_t every = 1) : OnStep(std::move(call), every) {
    part_.emplace(object);
  }

  void on_step(Run& run) override;
  TensorDict state() const override;
  void load_state(const TensorDict& state) override;

 private:
  std::function<void()> call_;
  int64_t every_;
  std::optional<TrainingPart> part_;
};

/// Several callbacks by name, called in the order in which they were added. Their states are saved under
/// "<name>.<key>", as in Python.
///
///     Callbacks callbacks;
///     callbacks.add("schedule", OnStep([&] { scheduler.step(); }, scheduler));
///     callbacks.add("averages", OnStep([&] { averages.update(); }, averages));
///     Run run{model.get(), {&optimizer}};
///     callbacks.on_start(run);
///     while (run.step < steps && !run.should_stop) {
///       run.loss = train_step();
///       ++run.step;
///       callbacks.on_step(run);
///     }
///     callbacks.on_end(run);
///     save_training(path, {training_tensors(*model), {&optimizer}, {{"callbacks", callbacks}}, run.step});
class SHOESTRING_API Callbacks : public Callback {
 public:
  /// Adds a callback. Throws c10::Error if the name is empty, has a dot, or is that of another callback.
  template <class Derived>
  void add(const std::string& name, Derived callback) {
    add(name, std::make_shared<Derived>(std::move(callback)));
  }
  /// Adds a callback that the caller keeps as well.
  template <class Derived>
  void add(const std::string& name, std::shared_ptr<Derived> callback) {
    add_callback(name, std::move(callback));
  }

  void on_start(Run& run) override;
  void on_step(Run& run) override;
  void on_metrics(Run& run) override;
  void on_end(Run& run) override;
  TensorDict state() const override;
  /// Throws c10::Error, before anything has changed, if a state belongs to no callback.
  void load_state(const TensorDict& state) override;

 private:
  void add_callback(const std::string& name, std::shared_ptr<Callback> callback);

  std::vector<std::pair<std::string, std::shared_ptr<Callback>>> callbacks_;
};

}  // namespace shoestring::callbacks
