// Tests OffloadActivations: every gradient must equal the gradient of the same training steps without
// offloading, bit for bit.
#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "folder.h"
#include "offload/disturbed.h"

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/checkpoint/offload_activations.h>

using at::Tensor;
using Catch::Contains;
using shoestring::OffloadActivations;
using shoestring::OffloadActivationsOptions;

namespace {

// While an object of this class exists, PyTorch uses one thread. With many threads, small operators would
// spend most of their time on synchronisation.
struct OneThread {
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

struct Model {
  explicit Model(int depth = 4) {
    at::manual_seed(3);
    for (int i = 0; i < depth; ++i) {
      layers.emplace_back(torch::nn::Linear(32, 64), torch::nn::Linear(64, 32));
    }
    frozen = at::randn({32, 32});
  }
  Tensor operator()(Tensor x, OffloadActivations* offload = nullptr) const {
    for (auto& [up, down] : layers) {
      if (offload != nullptr) offload->mark();
      Tensor y = up->forward(x);
      y = at::dropout(down->forward(at::relu_(y)), 0.2, /*train=*/true);
      x = x + y * x.sigmoid() + at::matmul(x, frozen).tanh();
    }
    return x.pow(2).mean();
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all;
    for (const auto& [up, down] : layers) {
      for (const Tensor& p : {up->weight, up->bias, down->weight, down->bias}) all.push_back(p);
    }
    return all;
  }
  mutable std::vector<std::pair<torch::nn::Linear, torch::nn::Linear>> layers;
  Tensor frozen;
};

std::vector<Tensor> gradients(const Model& model, const Tensor& x, OffloadActivations* offload,
                              bool marks = false) {
  at::manual_seed(9);
  Tensor loss;
  if (offload == nullptr) {
    loss = model(x);
  } else {
    const auto scope = offload->scope();
    loss = model(x, marks ? offload : nullptr);
  }
  auto of = model.parameters();
  of.push_back(x);
  return torch::autograd::grad({loss}, of);
}

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; equal && i < a.size(); ++i) equal = at::equal(a[i], b[i]);
  return equal;
}

}  // namespace

TEST_CASE("offload_activations gives the same gradients, from the host and from a disk", "[offload]") {
  const OneThread one_thread;
  const Folder folder;
  const Model model;
  const Tensor x = at::randn({16, 32}).requires_grad_();
  const auto expected = gradients(model, x, nullptr);
  auto excluded = model.parameters();
  excluded.push_back(model.frozen);
  for (const int64_t delay : {0, 300}) {
    const Disturbed slow({.max_delay_us = delay});
    for (const bool marks : {false, true}) {
      for (const std::string& place : {std::string(), folder.path}) {
        OffloadActivations offload(OffloadActivationsOptions().device("cpu").min_bytes(64).folder(place),
                                   excluded);
        for (int step = 0; step < 3; ++step) {
          CAPTURE(delay, marks, place, step);
          CHECK(same(gradients(model, x, &offload, marks), expected));
          CHECK(offload.statistics().at("entries") == 0);
        }
        const auto seen = offload.statistics();
        CHECK(seen.at("live") == 0);
        CHECK(seen.at("host") == 16 << 20);
        CHECK((seen.at("disk") > 0) == !place.empty());
        CHECK(seen.at("reloaded") > 0);
        CHECK(seen.at("reloaded") < seen.at("stored"));
      }
    }
  }
}

TEST_CASE("offload_activations leaves parameters where they are, and stores a storage once", "[offload]") {
  const OneThread one_thread;
  OffloadActivations offload(OffloadActivationsOptions().device("cpu").min_bytes(0));
  const Tensor weight = at::randn({50, 50}).requires_grad_(), x = at::randn({50, 50}).requires_grad_();
  offload.exclude({weight, x});
  {
    const auto scope = offload.scope();
    const Tensor y = at::matmul(x, weight.t()) + at::matmul(x, weight);
    CHECK(offload.statistics().at("stored") == 0);
    const Tensor z = at::matmul(y, y.t()) + at::matmul(y.narrow(0, 3, 7), y.narrow(1, 2, 7)).sum();
    CHECK(offload.statistics().at("stored") == 50 * 50 * 4);
  }
}

TEST_CASE("offload_activations: a graph that is kept, a second derivative, and steps that end early",
          "[offload]") {
  const OneThread one_thread;
  const Model model(3);
  const Tensor x = at::randn({16, 32}).requires_grad_();
  const auto derivatives = [&](OffloadActivations* offload) {
    at::manual_seed(9);
    Tensor loss;
    std::unique_ptr<OffloadActivations::Scope> scope;
    if (offload != nullptr) scope.reset(new OffloadActivations::Scope(offload->scope()));
    loss = model(x);
    std::vector<Tensor> all;
    for (int i = 0; i < 2; ++i)
      all.push_back(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0]);
    const Tensor slope = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
    scope.reset();
    for (const Tensor& g : torch::autograd::grad({slope.pow(2).sum()}, {x, model.layers[0].first->weight}))
      all.push_back(g);
    return all;
  };
  const auto expected = derivatives(nullptr);
  const Disturbed slow({.max_delay_us = 200});
  OffloadActivations offload(OffloadActivationsOptions().device("cpu").min_bytes(64));
  CHECK(same(derivatives(&offload), expected));
  {
    const auto scope = offload.scope();
    const Tensor loss = model(x);
    CHECK(offload.statistics().at("entries") > 0);
  }
  CHECK(offload.statistics().at("entries") == 0);
  const auto broken = [&] {
    const auto scope = offload.scope();
    const Tensor loss = model(x);
    throw std::runtime_error("broken forward");
  };
  CHECK_THROWS_WITH(broken(), "broken forward");
  CHECK(offload.statistics().at("entries") == 0);
  CHECK(same(derivatives(&offload), expected));
}

TEST_CASE("offload_activations: errors of the disk and of changes in place", "[offload]") {
  const OneThread one_thread;
  const Folder folder;
  const Model model;
  const Tensor x = at::randn({16, 32}).requires_grad_();
  const auto expected = gradients(model, x, nullptr);
  OffloadActivations offload(OffloadActivationsOptions().device("cpu").min_bytes(64).folder(folder.path));
  {
    const Disturbed full({.fail_after = 2, .error = ENOSPC});
    const auto steps = [&] {
      for (int i = 0; i < 3; ++i) gradients(model, x, &offload);
    };
    CHECK_THROWS_WITH(steps(), Contains("offload_activations: " + folder.path) && Contains("cannot write") &&
                                   Contains("free some space"));
  }
  CHECK(same(gradients(model, x, &offload), expected));
  const Tensor y = x * 1;
  Tensor loss;
  {
    const auto scope = offload.scope();
    loss = y.pow(2).sum();
  }
  y.detach().add_(1);
  CHECK_THROWS_WITH(loss.backward(),
                    Contains("changed in place") && Contains("expected version 0, received 1"));
  using Options = OffloadActivationsOptions;
  CHECK_THROWS_WITH(OffloadActivations(Options().compression("int3")),
                    Contains("expected none, bf16 or 8bit"));
  CHECK_THROWS_WITH(OffloadActivations(Options().host_bytes(5)), Contains("host_bytes: expected a folder"));
}

TEST_CASE("offload_activations: compressed values do not depend on the speed of copies", "[offload]") {
  const OneThread one_thread;
  const Model model(6);
  const Tensor x = at::randn({16, 32}).requires_grad_();
  const auto exact = gradients(model, x, nullptr);
  for (const std::string compression : {"bf16", "8bit"}) {
    OffloadActivations offload(
        OffloadActivationsOptions().device("cpu").min_bytes(64).compression(compression));
    std::vector<Tensor> fast;
    int64_t copied = 0;
    for (const int64_t delay : {0, 10'000, 0}) {
      CAPTURE(compression, delay);
      const Disturbed slow({.max_delay_us = delay});
      const int64_t before = offload.statistics().at("copied_out");
      const auto received = gradients(model, x, &offload, /*marks=*/true);
      const int64_t now = offload.statistics().at("copied_out") - before;
      if (fast.empty()) fast = received, copied = now;
      CHECK(same(received, fast));
      CHECK(now == copied);
    }
    CHECK_FALSE(same(fast, exact));
  }
}

TEST_CASE("offload_activations from several threads, and around a checkpoint", "[offload]") {
  const OneThread one_thread;
  const Model model;
  const Tensor x = at::randn({16, 32}).requires_grad_();
  OffloadActivations offload(OffloadActivationsOptions().device("cpu").min_bytes(64));
  const auto plain = [&](const Tensor& y) {
    Tensor z = y;
    for (auto& [up, down] : model.layers) z = z + down->forward(at::relu(up->forward(z)));
    return z.pow(2).mean();
  };
  const auto expected = torch::autograd::grad({plain(x)}, {x});
  const Disturbed slow({.max_delay_us = 200});
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 4; ++i) {
        Tensor loss;
        {
          const auto scope = offload.scope();
          loss = t == 0 ? shoestring::checkpoint(plain, x) : plain(x);
        }
        bad += !same(torch::autograd::grad({loss}, {x}), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad == 0);
  CHECK(offload.statistics().at("entries") == 0);
}
