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

// Selective checkpointing: stores the results of chosen operators while a function runs. When the function
// runs a second time, these operators return the stored results and are not computed again. It works below
// autograd and for every operator: a fallback on a dispatch key that PyTorch leaves unused sees each call.

namespace shoestring::activations {

class OperatorTape : public torch::CustomClassHolder {
 public:
  /// keep: names of operators ("aten::mm"), of groups of operators ("attention", "products"), and tags of
  /// tag_activation.
  explicit OperatorTape(const std::vector<std::string>& keep);

  /// One run of the function on one thread.
  struct Run;

  // Starts the first run on this thread: the calls that follow are recorded.
  void record();
  // Starts a second run on this thread. It may start before the first run has ended.
  void replay();
  // Ends the run that was started last.
  void end();
  // Ends the run that was started last, because it failed. Drops what a first run has recorded.
  void abandon();

  /// Stores the results of the operator of the first run that made x, if the tag was asked for.
  void tag(const at::Tensor& x, const std::string& tag);
  /// Computes a call of an operator, or returns the results that were stored in the first run.
  void call(Run& run, const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  struct Result {
    std::vector<c10::IValue> values;  // empty: not stored; after the first run their tensors are in `saved`
    // Versions of the tensors, to detect that the first run writes over them.
    std::vector<uint32_t> versions;
    // Holds the tensors once the first run has ended. SavedVariable detects in-place changes, and applies the
    // hooks that surround the checkpoint.
    std::vector<torch::autograd::SavedVariable> saved;
    // Sizes and dtypes of the arguments, to detect that the second run differs from the first.
    std::vector<int64_t> arguments;
    // Generator states after a random operator, so that later operators draw the same numbers in both runs.
    std::optional<RngState> rng;
  };
  struct Operator {
    bool wanted, aliasing;
    std::vector<Result> calls;
  };
  // The results of a call that is not stored, but may still be tagged.
  struct Made {
    Operator* op;
    size_t call;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    std::vector<c10::IValue> others;  // the operator's results after the first one
  };

  Operator& operator_of(const c10::OperatorHandle& op);
  void note_made(Operator& op, at::ArrayRef<c10::IValue> values);
  static void check_unchanged(const std::string& op, const Result& result);
  static void save(const std::string& op, Result& result);

  std::set<std::string> names_;
  bool recorded_ = false;  // the first run has ended, so the results are in `saved`
  std::unordered_map<c10::OperatorHandle, Operator> operators_;
  std::vector<Made> made_;
};

/// Hides the operators that this thread calls from all tapes, during its own lifetime.
class NoTape {
 public:
  NoTape();
  ~NoTape();
  NoTape(const NoTape&) = delete;
  NoTape& operator=(const NoTape&) = delete;
};

}  // namespace shoestring::activations
