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

// Selective checkpointing: the results of chosen operators are kept while a function runs, and handed out
// when it runs a second time, so that these operators are not computed twice. It works below autograd, for
// every operator that there is: a fallback on a dispatch key that PyTorch leaves unused sees each call.

namespace shoestring::activations {

class OperatorTape : public torch::CustomClassHolder {
 public:
  /// keep: names of operators ("aten::mm"), of groups of them ("attention", "products"), and tags of
  /// tag_activation.
  explicit OperatorTape(const std::vector<std::string>& keep);

  /// A run of the function on one thread.
  struct Run;

  void record();   // this thread's calls that follow are the first run's
  void replay();   // ... are another run's, which may begin before the first run has ended
  void end();      // of the run that was begun last
  void abandon();  // the same, of one that failed: what a first run recorded is dropped

  /// x is what an operator of the first run made: keeps that operator's results if the tag was asked for.
  void tag(const at::Tensor& x, const std::string& tag);
  /// Computes a call of an operator, or hands out what it gave in the first run.
  void call(Run& run, const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  struct Result {
    std::vector<c10::IValue> values;  // empty: not kept; after the first run `saved` has their tensors
    std::vector<uint32_t> versions;   // of the tensors, to see that nobody writes over them in the first run
    std::vector<torch::autograd::SavedVariable>
        saved;                       // sees it afterwards, and goes through hooks around the checkpoint
    std::vector<int64_t> arguments;  // sizes of the arguments, to see that the second run is as the first
    std::optional<RngState> rng;     // after a random operator, so that those behind it draw the same
  };
  struct Operator {
    bool wanted, aliasing;
    std::vector<Result> calls;
  };
  struct Made {  // by a call that was not kept, but may be tagged yet
    Operator* op;
    size_t call;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    std::vector<c10::IValue> others;  // its other results, where they are smaller; else none
  };

  Operator& operator_of(const c10::OperatorHandle& op);
  void note_made(Operator& op, at::ArrayRef<c10::IValue> values);
  static void check_unchanged(const std::string& op, const Result& result);
  static void save(const std::string& op, Result& result);

  std::set<std::string> names_;
  bool recorded_ = false;  // the first run has ended: results are in `saved`
  std::unordered_map<c10::OperatorHandle, Operator> operators_;
  std::vector<Made> made_;
};

/// No tape sees what this thread calls while it lives.
class NoTape {
 public:
  NoTape();
  ~NoTape();
  NoTape(const NoTape&) = delete;
  NoTape& operator=(const NoTape&) = delete;
};

}  // namespace shoestring::activations
