#include "offload/host_params.h"

#include <exception>
#include <utility>

namespace shoestring::offload {
namespace {

// Alignment in bytes of each tensor within a slab of host memory.
constexpr int64_t kParamAlignment = 64;

int64_t bytes_of(const Tensor& t) {
  return (static_cast<int64_t>(t.nbytes()) + kParamAlignment - 1) / kParamAlignment * kParamAlignment;
}

void copy_all(const std::vector<std::pair<Tensor, Tensor>>& copies) {
  for (const auto& [to, from] : copies) to.copy_(from, /*non_blocking=*/true);
}

uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : static_cast<uint32_t>(t._version()); }

}  // namespace

HostParams::HostParams(c10::intrusive_ptr<Offload> offload, const std::vector<Tensor>& params)
    : offload_(std::move(offload)), weights_(slab(params)), states_(params.size()) {}

// Allocates uninitialised contiguous tensors in host memory, with the shapes and dtypes of `like`, all in one
// slab.
std::vector<Tensor> HostParams::slab(const std::vector<Tensor>& like) {
  int64_t total = 0, begin = 0;
  for (const Tensor& t : like) total += bytes_of(t);
  const Tensor all = offload_->memory.empty({total}, at::kByte);
  std::vector<Tensor> tensors;
  for (const Tensor& t : like) {
    tensors.push_back(
        all.narrow(0, begin, static_cast<int64_t>(t.nbytes())).view(t.scalar_type()).view(t.sizes()));
    begin += bytes_of(t);
  }
  return tensors;
}

// Waits for all copies, which must finish before their memory is freed.
HostParams::~HostParams() {
  if (!offload_->process.is_here()) return;
  for (ParamState& state : states_) {
    for (const FencePtr& fence : {state.fetched, state.sent}) {
      try {
        if (fence != nullptr) fence->synchronize();
        // An error of the copy does not matter, since no optimizer step will use the copied values.
      } catch (const std::exception&) {
      }
    }
  }
}

void HostParams::mark(ParamState& state, const Tensor& param) {
  state.version = version_of(param);
  state.data = param.const_data_ptr();
  state.is_new = false;
}

void HostParams::fetch(int64_t index, const Tensor& param, const std::optional<Tensor>& grad) {
  ParamState& state = states_[static_cast<size_t>(index)];
  std::vector<std::pair<Tensor, Tensor>> copies;
  if (state.is_new || state.version != version_of(param) || state.data != param.const_data_ptr()) {
    copies.emplace_back(weights_[static_cast<size_t>(index)], param.variable_data());
    mark(state, param);
  }
  if (grad) {
    if (gradients_.empty()) {
      // Free the slabs that no tensor uses, such as those of a HostParams object that this one replaces.
      offload_->memory.trim();
      gradients_ = slab(weights_);
    }
    Tensor& on_host = gradients_[static_cast<size_t>(index)];
    if (on_host.scalar_type() != grad->scalar_type()) {
      on_host = offload_->memory.empty(grad->sizes(), grad->scalar_type());
    }
    state.has_gradient = true;
    copies.emplace_back(on_host, grad->variable_data());
  }
  if (copies.empty()) return;
  state.fetched = offload_->out.run({Fence::now(offload_->device)},
                                    [device = offload_->device, copies = std::move(copies)]() mutable {
                                      copy_all(copies);
                                      // The tensors in `copies` may be freed on the host after this job.
                                      // record_stream keeps the caching allocator from reusing their memory
                                      // before the copy has finished.
                                      for (auto& [to, from] : copies) {
                                        if (const auto stream = current_stream(device))
                                          from.record_stream(*stream);
                                      }
                                    });
}

std::vector<std::optional<Tensor>> HostParams::collect(int64_t first, int64_t last) {
  std::vector<std::optional<Tensor>> host_gradients;
  for (int64_t i = first; i < last; ++i) {
    ParamState& state = states_[static_cast<size_t>(i)];
    for (FencePtr* fence : {&state.fetched, &state.sent}) {
      if (const FencePtr over = std::exchange(*fence, nullptr)) over->synchronize();
    }
    const bool has = std::exchange(state.has_gradient, false);
    host_gradients.push_back(has ? std::optional<Tensor>(gradients_[static_cast<size_t>(i)]) : std::nullopt);
  }
  return host_gradients;
}

void HostParams::send(const std::vector<int64_t>& indices, const std::vector<Tensor>& params) {
  std::vector<std::pair<Tensor, Tensor>> copies;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<size_t>(indices[i]);
    copies.emplace_back(params[i].variable_data(), weights_[index]);
    if (!params[i].is_inference()) params[i].unsafeGetTensorImpl()->bump_version();
    mark(states_[index], params[i]);
  }
  const FencePtr sent = offload_->in.run({}, [copies = std::move(copies)] { copy_all(copies); });
  for (const int64_t index : indices) states_[static_cast<size_t>(index)].sent = sent;
}

void HostParams::receive() {
  const auto stream = current_stream(offload_->device);
  for (const ParamState& state : states_) {
    if (state.sent != nullptr) state.sent->block(stream);
  }
}

}  // namespace shoestring::offload
