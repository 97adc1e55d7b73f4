#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/rng_state.h"

// Selective checkpointing: a tape stores the results of chosen operators while a function runs. When the
// function runs a second time, these operators return the stored results instead of computing them. A tape
// works for every operator, at a level below autograd: a fallback on a dispatch key that PyTorch leaves
// unused sees each call.

namespace shoestring::activations {

class OperatorTape : public torch::CustomClassHolder {
 public:
  /// `keep` holds names of operators ("aten::mm"), names of groups of operators ("attention", "products"),
  /// and tags that the function passes to tag_activation.
  explicit OperatorTape(const std::vector<std::string>& keep);

  /// One run of the checkpointed function on one thread.
  struct Run;

  // Starts the first run of the function on this thread. The tape records all operator calls until end().
  void record();
  // Starts a second run of the function on this thread. A second run may start before the first run has
  // ended.
  void replay();
  // Ends the run that was started last on this thread.
  void end();
  // Ends the run that was started last on this thread, because the function failed. If it is a first run,
  // drops all recorded results.
  void abandon();

  /// If `keep` contains the tag, finds the operator call of the first run that made x, and stores all results
  /// of the call.
  void tag(const at::Tensor& x, const std::string& tag);
  /// Handles one operator call: computes and records it, or returns the results that were stored in the first
  /// run.
  void call(Run& run, const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  struct Result {
    // Results of one operator call; empty if they are not stored. After the first run of the function, the
    // tensors among the results are in `saved`.
    std::vector<c10::IValue> values;
    // Version counters of the tensors in `values`, to detect that the function modifies a stored result in
    // place.
    std::vector<uint32_t> versions;
    // After the first run of the function: the tensors from `values`. SavedVariable detects in-place changes,
    // and calls the saved-tensor hooks that are active around the checkpoint.
    std::vector<torch::autograd::SavedVariable> saved;
    // Sizes and dtypes of the operator's arguments, to detect that the second run differs from the first.
    std::vector<int64_t> arguments;
    // States of the random generators after the call, if the operator is random. Restoring them lets later
    // operators draw the same numbers in both runs.
    std::optional<RngState> rng;
  };
  struct Operator {
    bool is_kept, aliasing;
    std::vector<Result> calls;
  };
  // An operator call whose results are not stored yet; tag_activation may still request that they be stored.
  struct Made {
    Operator* op;
    size_t call;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    std::vector<c10::IValue> others;  // all results of the operator call except for the first
  };

  Operator& operator_of(const c10::OperatorHandle& op);
  void note_made(Operator& op, at::ArrayRef<c10::IValue> values);
  static void check_unchanged(const std::string& op, const Result& result);
  static void save(const std::string& op, Result& result);

  std::set<std::string> names_;
  // true once the first run has ended, so that the tensors of stored results are in `saved`
  bool recorded_ = false;
  std::unordered_map<c10::OperatorHandle, Operator> operators_;
  std::vector<Made> made_;
};

/// Calls f for each defined tensor in the arguments or results of an operator.
template <class F>
void each_tensor(at::ArrayRef<c10::IValue> values, const F& f) {
  const auto see = [&](const at::Tensor& tensor) {
    if (tensor.defined()) f(tensor);
  };
  for (const auto& value : values) {
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor) see(*tensor);
      }
    }
  }
}

/// Sees every operator call of this thread between watch() and unwatch(), also while a NoTape lives. It sees
/// no operators that other operators call.
class OperatorWatch {
 public:
  virtual ~OperatorWatch() = default;
  /// Is called before the operator runs.
  virtual void before(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) = 0;

 protected:
  void watch();
  /// Ends the watch that was started last on this thread.
  static void unwatch();
};

/// While a NoTape lives, no OperatorTape records or replaces the operator calls of this thread.
class NoTape {
 public:
  NoTape();
  ~NoTape();
  NoTape(const NoTape&) = delete;
  NoTape& operator=(const NoTape&) = delete;
};

}  // namespace shoestring::activations
