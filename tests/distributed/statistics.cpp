// Tests of the running statistics of normalisation layers in DataParallel.

#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "common.h"

// After each backward of DataParallel, all ranks have the running statistics of rank 0. Backward of
// micro-batches before the last one sends nothing.
void running_statistics(char**) {
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  torch::manual_seed(2);
  const torch::nn::BatchNorm1d norm(12);
  torch::nn::Sequential net(torch::nn::Linear(9, 12), norm, torch::nn::Linear(12, 2));
  const Tensor codes = net->register_buffer("codes", at::zeros({4}));
  shoestring::distributed::DataParallel parallel(*net, group);
  codes.fill_(rank);
  const auto is_that_of_rank_0 = [&](const Tensor& t) {
    std::vector<Tensor> first{t.clone()};
    shoestring::distributed::wait_for(group, group->broadcast(first), "statistics of rank 0");
    return first[0].equal(t);
  };
  const auto loss_of = [&](int64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(10 * seed + rank));
    return net->forward(at::randn({6, 9}, generator)).square().mean();
  };
  for (int64_t step = 0; step < 3; ++step) {
    loss_of(100 + step).backward();
    expect(is_that_of_rank_0(norm->running_mean) == (rank == 0), "each rank has its own statistics at first");
    const Tensor loss = loss_of(step);
    const Tensor own = norm->running_var.clone();
    parallel.backward(loss);
    expect(own.equal(norm->running_var) == (rank == 0), "rank 0 keeps its statistics");
    for (const Tensor& t : norm->buffers()) expect(is_that_of_rank_0(t), "statistics of rank 0");
    expect(norm->num_batches_tracked.item<int64_t>() == 2 * (step + 1), "two batches in each step");
    expect(size == 1 || is_that_of_rank_0(codes) == (rank == 0), "other buffers stay");
  }
}
