#include <cmath>
#include <cstdio>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <shoestring/shoestring.h>

// The host code that a C++ program with several GPUs writes: an all-reduce of NCCL, and a stream of its own,
// around a loss whose classes are split over processes. It compiles and links wherever the CUDA toolkit is.
// With a GPU, a single process runs all of it. Without a GPU, it computes on the CPU, and neither NCCL nor a
// stream takes part.
int main() {
  shoestring::install_autograd_engine();
  int failures = 0;
  const auto check = [&failures](bool good, const char* what) {
    std::printf("%s %s\n", good ? "ok" : "not ok", what);
    failures += !good;
  };
  const bool gpu = at::cuda::is_available();
  const at::Device device = gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  c10::intrusive_ptr<c10d::Backend> group;
  std::optional<c10::cuda::CUDAStreamGuard> stream;
  if (gpu) {
    group = c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::HashStore>(), 0, 1);
    stream.emplace(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()));
  }
  const auto all_reduce = [group](at::Tensor x, shoestring::Reduce reduce) {
    if (!group) return x;  // the sum and the maximum over a single process
    std::vector<at::Tensor> all{x};
    c10d::AllreduceOptions options;
    options.reduceOp = reduce == shoestring::Reduce::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
    group->allreduce(all, options)->wait();
    return x;
  };

  at::manual_seed(0);
  const auto made = at::TensorOptions().device(device);
  const at::Tensor target = at::randint(500, {64}, made.dtype(at::kLong));
  at::Tensor hidden = at::randn({64, 32}, made).requires_grad_();
  at::Tensor weight = at::randn({500, 32}, made).requires_grad_();
  const at::Tensor whole = shoestring::linear_cross_entropy(hidden, weight, target);
  const at::Tensor loss =
      shoestring::vocab_parallel_linear_cross_entropy(hidden, weight, target, /*first_class=*/0, all_reduce);
  check(std::abs(loss.item<double>() - whole.item<double>()) < 1e-5,
        "vocab_parallel_linear_cross_entropy of one process equals linear_cross_entropy");
  loss.backward();
  check(hidden.grad().isfinite().all().item<bool>() && weight.grad().defined(), "its gradients are complete");

  shoestring::OffloadActivations offload({}, {hidden, weight});
  shoestring::optim::AdamW optimizer({weight}, shoestring::optim::AdamWOptions(0.1).state_format("8bit"));
  optimizer.set_offload("stream");
  {
    const auto scope = offload.scope();
    shoestring::linear_cross_entropy(at::gelu(hidden), weight, target).backward();
  }
  optimizer.step();
  if (gpu) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  check(weight.isfinite().all().item<bool>(), "a step with offloaded activations and state is finite");
  std::printf("%s\n", gpu ? "NCCL and CUDA streams ran" : "no GPU: NCCL and CUDA streams did not run");
  return failures;
}
