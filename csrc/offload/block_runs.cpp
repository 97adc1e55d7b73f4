#include "offload/block_runs.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace shoestring::offload {
namespace {

// Gives access to a private member of StorageImpl, which says that a read of the storage is an error. PyTorch
// can set it, and has no function that clears it. Explicit instantiations may name private members.
bool& throws_on_read(c10::StorageImpl& storage);
template <bool c10::StorageImpl::* member>
struct ThrowsOnRead {
  friend bool& throws_on_read(c10::StorageImpl& storage) { return storage.*member; }
};
template struct ThrowsOnRead<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void place_storage(c10::StorageImpl& storage, at::DataPtr memory) {
  throws_on_read(storage) = false;
  storage.set_data_ptr_noswap(std::move(memory));
}

void place_storage(c10::StorageImpl& storage, void* memory, const at::Tensor& owner) {
  place_storage(storage, {memory, new at::Tensor(owner),
                          [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, owner.device()});
}

void empty_storage(c10::StorageImpl& storage, const std::string& error, at::DataPtr source) {
  storage.set_data_ptr_noswap(std::move(source));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(error);
}

// Drops the runs of this thread that an exception has ended. In a backward pass, drops only runs of that
// pass: the forward around it may still be running.
void BlockRuns::end_vanished() {
  const int pass = torch::autograd::get_current_graph_task_id();
  for (size_t i = runs_.size(); i-- > 0;) {
    const Run& run = runs_[i];
    if (run.can_vanish && run.thread == std::this_thread::get_id() &&
        (pass == BlockUses::kNoPass || pass == run.pass))
      drop(runs_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void BlockRuns::begin_run(int64_t index, bool can_vanish) {
  const std::lock_guard lock(mutex);
  end_vanished();
  BlockUses& uses = uses_of(index);
  fetch(index);
  ++uses.count;
  runs_.push_back(
      {index, std::this_thread::get_id(), torch::autograd::get_current_graph_task_id(), can_vanish});
}

void BlockRuns::drop(std::vector<Run>::iterator run) {
  const int64_t index = run->block;
  runs_.erase(run);
  BlockUses& uses = uses_of(index);
  --uses.count;
  if (uses.none()) unused(index);
}

void BlockRuns::end_run(int64_t index) {
  const std::lock_guard lock(mutex);
  const auto run = std::find_if(runs_.rbegin(), runs_.rend(), [&](const Run& r) {
    return r.block == index && r.thread == std::this_thread::get_id();
  });
  if (run != runs_.rend()) drop(std::prev(run.base()));
}

void BlockRuns::forget_runs() {
  runs_.clear();
  passes_.clear();
}

void BlockRuns::enter(int64_t index, const std::vector<at::Tensor>& inputs, bool can_vanish) {
  const std::lock_guard lock(mutex);
  begin_run(index, can_vanish);
  const bool follows = has_tiles() && output_of_ >= 0 && output_of_ == index - 1;
  if (torch::autograd::get_current_graph_task_id() != BlockUses::kNoPass) {
    // A checkpoint runs several blocks again in the order of forward.
    const int64_t direction = follows ? 1 : -1;
    prefetch(index + direction, direction);
  } else if (const int64_t last = last_block(); index < last) {
    prefetch(index + 1, 1);
  } else if (!at::GradMode::is_enabled() && repeats()) {
    prefetch(0, 1);
  }
  if (!at::GradMode::is_enabled() || inputs.empty()) return;
  const bool has_same_input = input_.lock().get() == inputs[0].unsafeGetTensorImpl();
  input_ = c10::weak_intrusive_ptr<c10::TensorImpl>(inputs[0].getIntrusivePtr());
  if (follows && has_same_input) {
    // The gradient of an input that tiles share is complete only when backward of all of them has ended.
    // Backward runs the later tile first, since its nodes are the newer ones.
    uses_of(output_of_).next = index;
    return;
  }
  // Backward of the block ends with the gradient of its first input. A leaf gets no hook, since the leaf
  // outlives the pass and would keep the hook.
  const auto first = std::find_if(inputs.begin(), inputs.end(), [](auto& x) { return x.requires_grad(); });
  if (first == inputs.end() || first->is_leaf()) return;
  if (output_of_ >= 0 && output_.lock().get() == first->unsafeGetTensorImpl()) {
    uses_of(output_of_).next = index;  // backward of the block before begins where this one's ends
    return;
  }
  first->register_hook([weak = self(), index](const at::Tensor&) {
    if (const auto runs = weak.lock()) runs->end_backward(index);
  });
}

void BlockRuns::leave(int64_t index, const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex);
  end_run(index);
  uses_of(index).next = -1;
  output_of_ = -1;
  if (!at::GradMode::is_enabled()) return;
  for (const at::Tensor& y : outputs) {
    if (!y.requires_grad() || y.is_leaf()) continue;
    if (output_of_ < 0) {
      output_ = c10::weak_intrusive_ptr<c10::TensorImpl>(y.getIntrusivePtr());
      output_of_ = index;
    }
    y.register_hook([weak = self(), index](const at::Tensor&) {
      if (const auto runs = weak.lock()) runs->begin_backward(index);
    });
  }
}

void BlockRuns::begin_backward(int64_t index) {
  const std::lock_guard lock(mutex);
  const int pass = torch::autograd::get_current_graph_task_id();
  BlockUses& uses = uses_of(index);
  if (uses.next >= 0) end_backward(uses.next);
  uses.pass = pass;
  fetch(index);
  prefetch(index - 1, -1);
  if (pass == BlockUses::kNoPass || std::find(passes_.begin(), passes_.end(), pass) != passes_.end()) return;
  passes_.push_back(pass);
  // The engine calls the callback after a backward pass without error, and destroys it after every one.
  struct End {
    std::weak_ptr<BlockRuns> weak;
    int pass;
    void close(bool failed) const {
      if (const auto runs = weak.lock()) runs->end_pass(pass, failed);
    }
    ~End() {
      try {
        close(/*failed=*/true);
      } catch (...) {  // a forked child, or a second error after that of backward
      }
    }
  };
  const std::shared_ptr<const End> end(new End{self(), pass});
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->close(/*failed=*/false); });
}

void BlockRuns::end_backward(int64_t index) {
  const std::lock_guard lock(mutex);
  BlockUses& uses = uses_of(index);
  if (uses.pass == BlockUses::kNoPass) return;
  uses.pass = BlockUses::kNoPass;
  ended(index);
  if (uses.none()) unused(index);
}

void BlockRuns::end_pass(int pass, bool has_failed) {
  const std::lock_guard lock(mutex);
  if (std::erase(passes_, pass) == 0) return;
  for (size_t i = runs_.size(); i-- > 0;) {
    if (runs_[i].pass == pass) drop(runs_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (int64_t i = 0; i < count(); ++i) {
    BlockUses& uses = uses_of(i);
    if (uses.pass != pass) continue;
    if (!has_failed) {
      end_backward(i);
      continue;
    }
    uses.pass = BlockUses::kNoPass;
    failed(i);
    if (uses.none()) unused(i);
  }
  if (!has_failed) ended_pass();
}

}  // namespace shoestring::offload
