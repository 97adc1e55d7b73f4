#pragma once

// Parameters that are trained from a later step on. shoestring/optim.h includes this header.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>

namespace shoestring::optim {

/// Freezes parameters until a given step. Which parameters are trained is a pure function of the step, so a
/// run that resumes trains the same ones. The Python counterpart is shoestring.optim.Unfreezing. Example:
///
///     Unfreezing unfreezing(*model, {{"head.*", 0}, {"layers.3.*", 500}, {"*", 1000}});
///     for (...) { ...; optimizer.step(); optimizer.zero_grad(); unfreezing.step(); }
///
/// The schedule maps patterns of names to the first step in which the parameters are trained. Of several
/// patterns that match, the earliest step counts. Parameters without a pattern do not change. In a pattern,
/// "*" stands for any text, dots included, "?" for one character, and "[ab]" for one of some characters.
///
/// A frozen parameter has requires_grad false and no gradient, so backward does not compute its gradient, and
/// our optimizers have no state for it. Steps count from 0.
class SHOESTRING_API Unfreezing {
 public:
  /// Freezes all parameters that step 0 does not train. Throws c10::ValueError, and changes nothing, if a
  /// pattern matches no parameter, or a step is negative.
  Unfreezing(const torch::nn::Module& module, std::map<std::string, int64_t> schedule);

  /// Returns the names of the parameters in the schedule that are trained in a step.
  std::vector<std::string> trained(int64_t step) const;

  /// Sets the parameters of the next step.
  void step() { step(step_ + 1); }
  /// Sets the parameters of step `step`.
  void step(int64_t step);
  /// Returns the step whose parameters are set.
  int64_t current_step() const { return step_; }

  /// Returns the step, as the int64 scalar "step".
  TensorDict state() const;
  /// Restores what state() has returned, and sets the parameters of that step. It may be called before the
  /// weights and the optimizer are restored, or after it.
  void load_state(const TensorDict& state);

 private:
  struct Entry {
    std::string name;
    at::Tensor parameter;
    int64_t first;
  };
  std::vector<Entry> entries_;
  int64_t step_ = 0;
};

}  // namespace shoestring::optim
