// State of optimizers in host memory or on a disk: the same results, whatever copies, reads and writes do.

#include "catch.h"

#include <cerrno>
#include <random>

#include "folder.h"
#include "io/disturb.h"
#include "offload/state.h"
#include "optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;
using shoestring::offload::Offload;
using shoestring::offload::State;

namespace {

struct Disturbed {
  explicit Disturbed(const shoestring::io::Disturbance& d) { shoestring::io::disturb(d); }
  ~Disturbed() { shoestring::io::disturb({}); }
};

Groups groups_of(const std::vector<Tensor>& p) { return {{{p[2], p[0]}}, {{p[1], p[3]}}}; }

std::vector<Tensor> params_of(const RuleCase& rule, at::ScalarType dtype) {
  return rule.name == "SGD" ? parameters(dtype) : matrices(dtype);
}

void check_same(LowMemoryOptimizer& a, const std::vector<Tensor>& p, LowMemoryOptimizer& b, const std::vector<Tensor>& q) {
  CHECK(equal(p, q));
  CHECK(a.state().size() == b.state().size());
  for (size_t i = 0; i < p.size(); ++i) {
    for (const auto& [name, tensor] : state_of(a, p[i]).tensors()) {
      CAPTURE(name, i);
      CHECK(at::equal(tensor, state_of(b, q[i])[name]));
    }
  }
}

}  // namespace

TEST_CASE("every optimizer does the same with its state offloaded", "[offload]") {
  const Folder folder;
  const Disturbed slow({.max_delay_us = 100, .short_transfers = true});
  for (const RuleCase& rule : rule_cases()) {
    for (const std::string state : {"8bit", "fp32"}) {
      for (const std::string place : {std::string("cpu"), std::string("stream"), "nvme:" + folder.path}) {
        for (const std::string weights : {"plain", "remainder"}) {
          CAPTURE(rule.name, state, place, weights);
          const auto device = params_of(rule, at::kBFloat16), offloaded = params_of(rule, at::kBFloat16);
          const auto one = rule.make(groups_of(device), state, weights), other = rule.make(groups_of(offloaded), state, weights);
          other->set_offload(place);
          for (auto* opt : {one.get(), other.get()}) opt->set_max_grad_norm(20);
          train(*one, device, 0, 4);
          train(*other, offloaded, 0, 4);
          check_same(*one, device, *other, offloaded);
          if (auto* averages = dynamic_cast<ScheduleFreeAdamW*>(other.get())) {
            averages->eval();
            static_cast<ScheduleFreeAdamW&>(*one).eval();
            CHECK(equal(device, offloaded));
          }
        }
      }
    }
  }
}

TEST_CASE("state moves, and checkpoints are the same wherever it lies", "[offload]") {
  const Folder folder;
  const std::string path = folder / "optimizer.safetensors", disk = "nvme:" + folder.path;
  const auto through = parameters(at::kBFloat16), moved = parameters(at::kBFloat16), resumed = parameters(at::kBFloat16);
  const auto make = [](const std::vector<Tensor>& params) {
    return AdamW(groups_of(params), AdamWOptions(1e-2).weights("remainder"));
  };
  AdamW one = make(through), two = make(moved), three = make(resumed);
  three.set_offload("stream");
  train(one, through, 0, 6);
  train(two, moved, 0, 2);
  two.set_offload(disk);
  train(two, moved, 2, 3);
  two.set_offload("cpu");
  train(two, moved, 3, 4);
  two.set_offload(disk);
  copy(moved, resumed);
  save_optimizer(two, path);
  load_optimizer(three, path);
  train(three, resumed, 4, 6);
  check_same(one, through, three, resumed);
  two.set_offload(std::nullopt);
  load_archive(two, archived(two));
  train(two, moved, 4, 6);
  check_same(one, through, two, moved);
  CHECK(folder.files() == std::vector<std::string>{"optimizer.safetensors"});
}

TEST_CASE("sums of micro-batches and steps within backward, offloaded", "[offload]") {
  const Folder folder;
  const Disturbed slow({.max_delay_us = 100});
  for (const bool in_backward : {false, true}) {
    for (const std::string place : {std::string("cpu"), std::string("stream"), "nvme:" + folder.path}) {
      CAPTURE(in_backward, place);
      const bool exact = place == "cpu";  // clips by the norm of all gradients, and not of those of the step before
      const auto device = parameters(), offloaded = parameters();
      AdEMAMix one(groups_of(device)), other(groups_of(offloaded));
      other.set_offload(place);
      const auto run = [&](AdEMAMix& opt, const std::vector<Tensor>& params, bool in_backward) {
        opt.set_step_in_backward(in_backward);
        opt.set_max_grad_norm(9);
        at::manual_seed(5);
        for (int step = 0; step < 4; ++step) {
          for (int micro = 0; micro < 3; ++micro) {
            const auto sums = micro < 2 ? opt.accumulate() : nullptr;
            Tensor loss = at::zeros({});
            for (const Tensor& p : params) loss = loss + (p * at::randn(p.sizes())).sum();
            loss.backward();
          }
          opt.step();
          opt.zero_grad();
        }
      };
      run(one, device, in_backward && !exact);
      run(other, offloaded, in_backward);
      CHECK(at::equal(one.grad_norm(), other.grad_norm()));
      check_same(one, device, other, offloaded);
    }
  }
}

TEST_CASE("a step that fails can be repeated, with its own gradients alone", "[offload]") {
  const Folder folder;
  for (const int after : {0, 3, 6, 9, 14}) {  // reads and writes of both groups: 4 parts, some 8 each
    CAPTURE(after);
    const auto device = parameters(), offloaded = parameters();
    AdamW one(groups_of(device)), other(groups_of(offloaded));
    other.set_offload("nvme:" + folder.path);
    train(one, device, 0, 3);
    train(other, offloaded, 0, 2);
    const Disturbed bad({.fail_after = after, .error = EIO});
    new_gradients(offloaded, 2);
    CHECK_THROWS_WITH(other.step(), Contains("AdamW: offload: " + folder.path + "/shoestring-swap-") &&
                                        Contains("bytes at ") && Contains("Input/output error"));
    CHECK(state_of(other, offloaded[2])["step"].item<float>() == 2);
    other.step();
    check_same(one, device, other, offloaded);
  }
  const auto params = parameters();
  AdamW opt(params);
  opt.set_offload("nvme:" + folder.path);
  train(opt, params, 0, 1);
  const Disturbed bad({.fail_after = 0, .error = EIO});
  new_gradients(params, 1);
  CHECK_THROWS(opt.step());
  new_gradients(params, 2);
  CHECK_THROWS_WITH(opt.step(), Contains("expected the gradients of the step that failed"));
}

TEST_CASE("a place that is none is refused, and nothing changes", "[offload]") {
  const Folder folder;
  const auto params = parameters();
  Lion opt(params);
  train(opt, params, 0, 1);
  CHECK_THROWS_WITH(opt.set_offload("disk"),
                    Contains("Lion: offload: expected None, \"cpu\", \"stream\" or \"nvme:DIR\", received \"disk\""));
  CHECK_THROWS_WITH(opt.set_offload("nvme:" + folder / "none"), Contains("No such file"));
  train(opt, params, 1, 2);
  CHECK(state_of(opt, params[1])["step"].item<float>() == 2);
}

TEST_CASE("chunks of state are what was put, in any order", "[offload]") {
  const Folder folder;
  const auto seed = std::random_device()();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const std::vector<int64_t> blocks{3, 5000, 0, 700, 1, 9000, 0};
  for (const std::string place : {std::string("stream"), "nvme:" + folder.path}) {
    for (const bool splits : {false, true}) {
      CAPTURE(place, splits);
      const auto offload = c10::make_intrusive<Offload>("test", place, c10::Device(c10::kCPU));
      // 2 KiB and a scale for a block: chunks of 4096 blocks.
      State state(offload, {at::kFloat, at::kFloat}, {512, 1}, blocks, splits);
      const auto all = state.chunks(0, std::ssize(blocks));
      CHECK(all.size() == 4);
      int64_t covered = 0;
      std::vector<bool> counted(blocks.size());
      for (const int64_t chunk : all) {
        const auto piece = state.piece(chunk, 0, std::ssize(blocks));
        covered += piece.blocks;
        for (int64_t i = piece.first; i < piece.last; ++i) counted[static_cast<size_t>(i)] = true;
      }
      CHECK(covered == 3 + 5000 + 700 + 1 + 9000);
      CHECK(std::all_of(counted.begin(), counted.end(), [](bool b) { return b; }));
      for (const Tensor& part : state.values()) CHECK(part.count_nonzero().item<int64_t>() == 0);

      std::vector<float> expected(all.size());
      const Disturbed slow({.max_delay_us = 200});
      for (int step = 0; step < 5; ++step) {
        auto order = all;
        std::shuffle(order.begin(), order.end(), random);
        const auto plan = step % 2 == 0 ? order : all;  // what is read ahead may not be what is taken
        if (step % 2 == 0) order.insert(order.end(), order.begin(), order.begin() + 2);  // some again
        state.start(plan);
        for (const int64_t chunk : order) {
          const auto parts = state.take(chunk);
          float& value = expected[static_cast<size_t>(chunk)];
          for (const Tensor& part : parts) {
            REQUIRE(part[0].item<float>() == value);
            REQUIRE(part[-1].item<float>() == value);
            part.add_(1);
          }
          value += 1;
          state.put(chunk);
          CHECK(state.done(chunk));
        }
        state.finish();
        state.commit();
        for (const int64_t chunk : all) {
          const auto piece = state.piece(chunk, 0, std::ssize(blocks));
          const int64_t begin = state.begins()[static_cast<size_t>(piece.first)] + piece.first_block;
          for (size_t i : {0, 1}) {
            const int64_t n = i == 0 ? 512 : 1;
            const Tensor part = state.values()[i].narrow(0, begin * n, piece.blocks * n);
            REQUIRE((part == expected[static_cast<size_t>(chunk)]).all().item<bool>());
          }
        }
      }
    }
  }
}
